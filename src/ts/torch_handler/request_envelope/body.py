"""What handlers import from `ts.torch_handler.request_envelope.body`."""

from flambeau.handlers.envelopes.base import BodyEnvelope as BodyEnvelope
