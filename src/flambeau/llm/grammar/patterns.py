r"""Regular expressions of JSON schemas, which are ECMAScript's, in the notation of llguidance's lexer, which is Rust's.

`.`, `\s` and others stand for other characters there, and sets may contain sets. The result matches no text that
ECMAScript or Python would not match.
"""

from __future__ import annotations

import re

DOT = r"[^\n\r\u2028\u2029]"
# Characters for which ECMAScript and Python agree, and those of one of them.
CLASSES = {
    "s": (
        r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
        r"\t-\r\u001c- \u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
    ),
    "d": ("0-9", r"\p{Decimal_Number}"),
    "w": ("0-9A-Z_a-z", r"\p{L}\p{N}_"),
}
TOKEN = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
SET_TOKEN = re.compile(r"\\.|&&|~~|--|.", re.DOTALL)
DOT_ALL = re.compile(r"\(\?[a-zA-Z]*s")


def to_rust(pattern: str) -> str:
    """Raises ValueError for what has another meaning in Rust and cannot be translated."""
    dot = "." if DOT_ALL.search(pattern) else DOT
    written: list[str] = []
    place = 0
    while (token := TOKEN.match(pattern, place)) is not None:
        place, text = token.end(), token[0]
        if text.startswith("["):
            place = _set(pattern, place, text, written)
        elif text[0] == "\\" and text[1:].lower() in CLASSES:
            written.append(f"[{_class(text[1:], is_negated=False)}]")
        else:
            written.append(dot if text == "." else text)
    return "".join(written)


def _set(pattern: str, place: int, start: str, written: list[str]) -> int:
    """Translate a set from behind its `start`; returns the place behind it."""
    is_negated = start.startswith("[^")
    written.append(start)
    while (token := SET_TOKEN.match(pattern, place)) is not None:
        place, text = token.end(), token[0]
        if text == "--":
            raise ValueError("-- within [] has no common meaning; write a single - at its end")
        if text[0] == "\\" and text[1:].lower() in CLASSES:
            written.append(_class(text[1:], is_negated=is_negated))
        elif text in ("[", "&&", "~~"):
            written += [f"\\{sign}" for sign in text]
        else:
            written.append(text)
            if text == "]":
                break
    return place


def _class(letter: str, *, is_negated: bool) -> str:
    """The content of a set: for a negated one, as much as any of them means."""
    narrow, wide = CLASSES[letter.lower()]
    if letter.islower():
        return wide if is_negated else narrow
    return f"[^{narrow if is_negated else wide}]"
