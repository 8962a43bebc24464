"""What handlers import from `ts.torch_handler.request_envelope.kserve`."""

from flambeau.handlers.envelopes.kserve import KServeEnvelope as KServeEnvelope
