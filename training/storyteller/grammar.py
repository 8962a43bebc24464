"""A grammar in text: `[a|b]` is one of several, `{slot}` a value; articles and capitals come out right."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import lru_cache

TOKEN = re.compile(r"\[|\]|\||\{\w+\}|[^\[\]|{}]+")
ARTICLE = re.compile(r"\b([Aa]) (?=(?:[aei]|o(?!ne\b)|u(?!n?i|se)|hour|honest))", re.IGNORECASE)
SENTENCE = re.compile(r"((?:^|[.!?] |\.\" |\n)\"?)([a-z])")

Node = str | tuple[str] | list[list["Node"]]  # text, a slot, or a choice of sequences


def expand(template: str, rng: random.Random, slots: Mapping[str, str]) -> str:
    """A text of the template; a slot with a capital is the value with a capital."""
    return polish(write(template, rng, slots))


def polish(text: str) -> str:
    """The text with `an` before vowels and a capital at the start of each sentence."""
    text = ARTICLE.sub(r"\1n ", text.strip())
    return SENTENCE.sub(lambda match: match[1] + match[2].upper(), text)


def write(template: str, rng: random.Random, slots: Mapping[str, str]) -> str:
    """A text of the template, not polished yet."""
    parts: list[str] = []
    append(parse(template), rng, slots, parts)
    return "".join(parts)


def append(nodes: list[Node], rng: random.Random, slots: Mapping[str, str], parts: list[str]) -> None:
    """Write nodes one after another; the value of a slot may be a template."""
    for node in nodes:
        if isinstance(node, str):
            parts.append(node)
        elif isinstance(node, list):
            append(node[int(rng.random() * len(node))], rng, slots, parts)
        else:
            value = value_of(node[0], slots)
            append(parse(value), rng, slots, parts) if "[" in value or "{" in value else parts.append(value)


def value_of(name: str, slots: Mapping[str, str]) -> str:
    """The value of a slot."""
    if name in slots:
        return slots[name]
    value = slots[name[0].lower() + name[1:]]
    return value[0].upper() + value[1:]


@lru_cache(maxsize=100_000)
def parse(template: str) -> list[Node]:
    """The template as nodes."""
    stack: list[list[list[Node]]] = [[[]]]
    for token in TOKEN.findall(template):
        if token == "[":
            stack.append([[]])
        elif token == "|" and len(stack) > 1:
            stack[-1].append([])
        elif token == "]":
            choice = stack.pop()
            stack[-1][-1].append(choice)
        elif token[0] == "{":
            stack[-1][-1].append((token[1:-1],))
        else:
            stack[-1][-1].append(token)
    if len(stack) != 1:
        raise ValueError(f"a bracket is not closed in {template!r}")
    return stack[0][0]
