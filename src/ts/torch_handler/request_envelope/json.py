"""What handlers import from `ts.torch_handler.request_envelope.json`."""

from flambeau.handlers.envelopes.base import JSONEnvelope as JSONEnvelope
