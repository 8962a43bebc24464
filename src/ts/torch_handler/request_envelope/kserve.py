"""What handlers import from `ts.torch_handler.request_envelope.kserve`."""

from flambeau.handlers.envelopes.envelopes import KServeEnvelope as KServeEnvelope
