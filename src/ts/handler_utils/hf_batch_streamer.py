"""What handlers import from `ts.handler_utils.hf_batch_streamer`."""

from flambeau.torchserve.handlers.text_streamer import TextIteratorStreamerBatch as TextIteratorStreamerBatch
