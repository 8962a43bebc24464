"""English contractions and what they stand for."""

from __future__ import annotations

from collections.abc import Iterator

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
PERSONS = {  # who takes which form of "to be"
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
    """Each contraction with its long form, in lower case."""
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
