"""The steps that make a text plain, each a function of text to text."""

from __future__ import annotations

import re
import string
import unicodedata

from flambeau.handlers.text.contractions import CONTRACTION_MAP

ENTITY = r"&(?:[a-z0-9]+|#(?:[0-9]{1,6}|x[0-9a-f]{1,6}));"
HTML = re.compile(rf"<[^>\n]*>|{ENTITY}")
_ENTITY = re.compile(ENTITY)
# The longest first, so that "can't've" is not read as "can't" and a rest.
_CONTRACTIONS = re.compile("|".join(sorted(map(re.escape, CONTRACTION_MAP), key=len, reverse=True)), re.IGNORECASE)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def remove_html_tags(text: str) -> str:
    """Without tags and entities."""
    return "\n".join(map(_remove_tags_of_line, text.split("\n")))


def _remove_tags_of_line(line: str) -> str:
    # Only up to the last ">" can there be tags: a million "<" without one would take the expression an hour.
    inside, mark, rest = line.rpartition(">")
    return HTML.sub("", inside + mark) + _ENTITY.sub("", rest)


def expand_contractions(text: str) -> str:
    """With contractions written out, and without apostrophes."""

    def expand(match: re.Match[str]) -> str:
        found = match.group()
        long = CONTRACTION_MAP.get(found.lower(), found)
        return found[0] + long[1:] if found[0].lower() == long[0] else long

    return _CONTRACTIONS.sub(expand, text).replace("'", "")


def remove_accents(text: str) -> str:
    """In ASCII: accents are dropped, and so is what has no plain letter."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def remove_punctuation(text: str) -> str:
    """Without ASCII punctuation."""
    return text.translate(_NO_PUNCTUATION)
