"""What handlers import from `ts.torch_handler.request_envelope.base`."""

from flambeau.handlers.envelopes.base import BaseEnvelope as BaseEnvelope
