"""What handlers import from `ts.torch_handler.request_envelope.body`."""

from flambeau.handlers.envelopes.envelopes import BodyEnvelope as BodyEnvelope
