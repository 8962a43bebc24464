"""TextIteratorStreamerBatch: streams the texts of a batch from `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flambeau.torchserve.handlers.functions import need


class TextIteratorStreamerBatch:
    """A streamer for `generate`.

    Iterating yields a list of `{"text": …}`, one per sequence, until one sequence ends.
    """

    def __init__(
        self,
        tokenizer: Any,
        batch_size: int,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        streamer = need("transformers", "pip install transformers").TextIteratorStreamer
        self.batch_size = batch_size
        self.streamers = [streamer(tokenizer, skip_prompt, timeout, **decode_kwargs) for _ in range(batch_size)]

    def put(self, value: Any) -> None:
        """Add the next tokens, one row per sequence."""
        if value.shape[0] != self.batch_size:
            raise ValueError(
                f"TextIteratorStreamerBatch batch size is set to {self.batch_size} but got input tensor of shape "
                f"{tuple(value.shape)}"
            )
        for i, streamer in enumerate(self.streamers):
            streamer.put(value[i : i + 1])

    def end(self) -> None:
        for streamer in self.streamers:
            streamer.end()

    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        return self

    def __next__(self) -> list[dict[str, str]]:
        texts: list[Any] = [next(streamer, None) for streamer in self.streamers]
        if None in texts:
            raise StopIteration
        return [{"text": text} for text in texts]
