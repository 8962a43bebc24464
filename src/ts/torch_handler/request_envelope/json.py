"""What handlers import from `ts.torch_handler.request_envelope.json`."""

from flambeau.handlers.envelopes.envelopes import JSONEnvelope as JSONEnvelope
