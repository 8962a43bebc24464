"""Text normalization: HTML, contractions, accents and punctuation."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterator

ENTITY = r"&(?:[a-z0-9]+|#(?:[0-9]{1,6}|x[0-9a-f]{1,6}));"
HTML = re.compile(rf"<[^>\n]*>|{ENTITY}")
_ENTITY = re.compile(ENTITY)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

NEGATED = [
    "are",
    "could",
    "dare",
    "did",
    "do",
    "does",
    "had",
    "has",
    "have",
    "is",
    "may",
    "might",
    "must",
    "need",
    "ought",
    "should",
    "was",
    "were",
    "would",
]  # n't
SUFFIXES = {"ll": "will", "ve": "have", "d": "would", "d've": "would have", "ll've": "will have"}
PERSONS = {  # → the suffix of "to be"
    "i": "m",
    "you": "re",
    "he": "s",
    "she": "s",
    "it": "s",
    "we": "re",
    "they": "re",
}
TO_BE = {"m": "am", "re": "are", "s": "is"}
QUESTIONS = ["what", "who", "when", "where", "why", "how", "that", "there", "here", "this"]
MODALS = ["could", "might", "must", "ought", "should", "would"]
IRREGULAR = {
    "ain't": "is not",
    "can't": "cannot",
    "can't've": "cannot have",
    "won't": "will not",
    "won't've": "will not have",
    "shan't": "shall not",
    "shan't've": "shall not have",
    "let's": "let us",
    "sha'n't": "shall not",
    "so's": "so as",
    "so've": "so have",
    "to've": "to have",
    "will've": "will have",
    "how'd'y": "how do you",
    "ma'am": "madam",
    "o'clock": "of the clock",
    "'cause": "because",
    "y'all": "you all",
    "y'all'd": "you all would",
    "y'all'd've": "you all would have",
    "y'all're": "you all are",
    "y'all've": "you all have",
}


def contractions() -> Iterator[tuple[str, str]]:
    """Pairs of a contraction and its long form, in lower case."""
    for verb in NEGATED:
        yield f"{verb}n't", f"{verb} not"
    for verb in (*MODALS, "had", "need"):
        yield f"{verb}n't've", f"{verb} not have"
    for verb in MODALS:
        yield f"{verb}'ve", f"{verb} have"
    for person, ending in PERSONS.items():
        yield f"{person}'{ending}", f"{person} {TO_BE[ending]}"
    for word in QUESTIONS:
        yield f"{word}'s", f"{word} is"
        yield f"{word}'re", f"{word} are"
    for word in (*PERSONS, *QUESTIONS):
        for suffix, long in SUFFIXES.items():
            yield f"{word}'{suffix}", f"{word} {long}"
    for word in ("how", "what", "when", "where", "why"):
        yield f"{word}'d", f"{word} did"
    yield from IRREGULAR.items()


CONTRACTION_MAP = dict(contractions())
# Longest first, so that "can't've" does not match as "can't" plus a rest.
_CONTRACTIONS = re.compile("|".join(sorted(map(re.escape, CONTRACTION_MAP), key=len, reverse=True)), re.IGNORECASE)


def remove_html_tags(text: str) -> str:
    """Remove tags and entities."""
    return "\n".join(map(_remove_tags_of_line, text.split("\n")))


def _remove_tags_of_line(line: str) -> str:
    # Tags end before the last ">". Without this cut, the expression takes quadratic time on many "<".
    inside, mark, rest = line.rpartition(">")
    return HTML.sub("", inside + mark) + _ENTITY.sub("", rest)


def expand_contractions(text: str) -> str:
    """Write contractions out and remove apostrophes."""
    return _CONTRACTIONS.sub(_expand, text).replace("'", "")


def _expand(match: re.Match[str]) -> str:
    found = match.group()
    long = CONTRACTION_MAP.get(found.lower(), found)
    return found[0] + long[1:] if found[0].lower() == long[0] else long


def remove_accents(text: str) -> str:
    """Convert to ASCII: accents are dropped, and so are characters without a plain letter."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def remove_punctuation(text: str) -> str:
    """Remove ASCII punctuation."""
    return text.translate(_NO_PUNCTUATION)
