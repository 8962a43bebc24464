"""Ids of calls in earlier messages, for models that read them: nine letters and digits (Mistral), or names (Kimi)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
NAMED_ID = re.compile(r"functions\.[\w.-]+:\d+")
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy in which every id of a call has nine characters; equal ids stay equal."""
    return [_with_short_ids(message) for message in messages]


def with_named_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy in which the id of a call has its name and its number in the conversation; results have the same."""
    names: dict[str, str] = {}
    number, copies = 0, []
    for message in messages:
        copy = dict(message)
        if isinstance(calls := message.get("tool_calls"), list):
            copy["tool_calls"] = []
            for call in calls:
                given, name = str(call.get("id")), (call.get("function") or {}).get("name")
                names[given] = given if NAMED_ID.fullmatch(given) else f"functions.{name}:{number}"
                copy["tool_calls"].append({**call, "id": names[given]})
                number += 1
        if (answered := message.get("tool_call_id")) in names:
            copy["tool_call_id"] = names[str(answered)]
        copies.append(copy)
    return copies


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    copy = dict(message)
    if isinstance(call_id := message.get("tool_call_id"), str):
        copy["tool_call_id"] = short_id(call_id)
    if isinstance(calls := message.get("tool_calls"), list):
        copy["tool_calls"] = [
            {**call, "id": short_id(call["id"])} if isinstance(call.get("id"), str) else call for call in calls
        ]
    return copy


def short_id(call_id: str) -> str:
    if SHORT_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=8).digest())
    return "".join(DIGITS[number // 36**i % 36] for i in range(9))
