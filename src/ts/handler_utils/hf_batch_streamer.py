"""What handlers import from `ts.handler_utils.hf_batch_streamer`."""

from flambeau.handlers.text.streamers import TextIteratorStreamerBatch as TextIteratorStreamerBatch
