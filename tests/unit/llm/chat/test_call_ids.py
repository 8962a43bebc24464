"""Ids that Mistral's chat templates accept."""

from __future__ import annotations

from flambeau.llm.chat.call_ids import SHORT_ID, with_short_ids


def test_ids_become_short_and_stay_equal():
    call = {"id": "call_0123", "type": "function", "function": {"name": "f"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call, {**call, "id": "Abcdefgh9"}, {"function": {"name": "g"}}]},
        {"role": "tool", "tool_call_id": "call_0123", "content": "1"},
    ]
    user, assistant, tool = with_short_ids(messages)
    assert user == messages[0]
    first, second, third = assistant["tool_calls"]
    assert SHORT_ID.fullmatch(first["id"])
    assert first["id"] == tool["tool_call_id"] != second["id"] == "Abcdefgh9"
    assert "id" not in third
    assert call["id"] == "call_0123"
