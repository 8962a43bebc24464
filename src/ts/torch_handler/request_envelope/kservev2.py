"""What handlers import from `ts.torch_handler.request_envelope.kservev2`."""

from flambeau.handlers.envelopes.kserve import KServev2Envelope as KServev2Envelope
