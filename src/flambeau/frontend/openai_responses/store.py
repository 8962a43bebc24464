"""ResponseStore: finished responses, kept in memory for a while, so that later requests can refer to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

KEPT_S = 3600.0
MAX_BYTES = 64 << 20
MAX_RESPONSES = 100_000

Document = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_decode_list = msgspec.json.Decoder(list[dict[str, Any]]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response as JSON, with the conversation that a later request continues."""

    owner: str  # the name of the key that made it; empty: the server has no keys
    document: bytes
    input_items: bytes
    messages: bytes  # of the whole conversation, the model's answer included; without instructions
    expires_at: float

    @property
    def size_bytes(self) -> int:
        return len(self.document) + len(self.input_items) + len(self.messages)

    def conversation(self) -> list[Document]:
        return _decode_list(self.messages)

    def items(self) -> list[Document]:
        return _decode_list(self.input_items)


class ResponseStore:
    """Responses by id. The oldest go first when there are too many bytes; each expires after a while."""

    def __init__(self, *, kept_s: float = KEPT_S, max_bytes: int = MAX_BYTES) -> None:
        self._kept_s, self._max_bytes = kept_s, max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(
        self,
        id: str,
        owner: str,
        document: Document,
        items: Sequence[Document],
        messages: Sequence[Document],
        now: float,
    ) -> None:
        stored = StoredResponse(
            owner=owner,
            document=_encode(document),
            input_items=_encode(items),
            messages=_encode(messages),
            expires_at=now + self._kept_s,
        )
        self._stored[id] = stored
        self.num_bytes += stored.size_bytes
        self._drop_oldest(now)

    def get(self, id: str, owner: str, now: float) -> StoredResponse | None:
        """None for an unknown or expired id, and for a response of another key."""
        stored = self._stored.get(id)
        return stored if stored is not None and stored.owner == owner and now < stored.expires_at else None

    def delete(self, id: str, owner: str, now: float) -> bool:
        if self.get(id, owner, now) is None:
            return False
        self.num_bytes -= self._stored.pop(id).size_bytes
        return True

    def _drop_oldest(self, now: float) -> None:
        while self._stored:
            oldest = next(iter(self._stored.values()))
            has_room = self.num_bytes <= self._max_bytes and len(self._stored) <= MAX_RESPONSES
            if has_room and now < oldest.expires_at:
                return
            self.num_bytes -= oldest.size_bytes
            self._stored.popitem(last=False)
