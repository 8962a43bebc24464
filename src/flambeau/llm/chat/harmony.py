"""gpt-oss writes channels: analysis is reasoning, final is the answer, and a message to a function is a call."""

from __future__ import annotations

import re

from flambeau.llm.chat.stream_parser import NAME, Steps, StreamParser

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class HarmonyParser(StreamParser):
    """Messages with a header that names the channel and the recipient. Reasoning has no markers of its own."""

    markers = (CHANNEL, START, MESSAGE)

    def _parse(self) -> Steps[None]:
        channel, start, message = map(self.spell, (CHANNEL, START, MESSAGE))
        while True:
            found = yield from self._emit_text_until(channel, start, message)
            if found is None:
                return
            header = found
            while found not in (message, ""):
                text, found = yield from self._read_until(channel, start, message)
                header += text + found
            if not found:
                self._at = len(self._text)  # a header without a message
                continue
            yield from self._read_message(header)

    def _read_message(self, header: str) -> Steps[None]:
        recipient = RECIPIENT.search(header)
        name = recipient[1].partition("\ufdd1")[0] if recipient else ""
        kind = header.rpartition(self.spell(CHANNEL))[2].strip()
        if kind.startswith("analysis"):
            yield from self._emit_reasoning()
        elif name and NAME.fullmatch(name):
            self._begin_call(name)
            if (yield from self._peek()) == "{":
                yield from self._stream_json()
            yield from self._read_until(*self._ends())
        else:
            yield from self._emit_text_until(*self._ends())
            self._drops_space = False

    def _ends(self) -> list[str]:
        return [self.spell(marker) for marker in (END, CALL, RETURN)]

    def _emit_reasoning(self) -> Steps[None]:
        self.is_reasoning = True
        ends = self._ends()
        if self._num_thoughts:
            self._delta.reasoning += "\n"
        self._num_thoughts += 1
        while True:
            size, found = self._find(ends)
            self._delta.reasoning += self._cut(size)
            self._at += len(found)
            if found or not (yield from self._more()):
                break
        self.is_reasoning = False

    _num_thoughts = 0
