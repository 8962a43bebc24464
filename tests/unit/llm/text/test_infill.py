"""Prompts for a text between two others, in the tokens of each family."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("sentencepiece")

from flambeau.llm.text.infill import FAMILIES
from flambeau.llm.text.tokenizer import load_tokenizer
from support.tokenizer_files import byte_level_json, write_json_tokenizer, write_sentencepiece

PREFIX, SUFFIX = "To be, ", " not to be"
# As the makers of the models document them; BOS is "<|begin|>" here.
WANTED = {
    "<|fim_prefix|>": f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
    "<fim_prefix>": f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>",
    "<｜fim▁begin｜>": f"<｜fim▁begin｜>{PREFIX}<｜fim▁hole｜>{SUFFIX}<｜fim▁end｜>",
    "[PREFIX]": f"[SUFFIX]{SUFFIX}[PREFIX]{PREFIX}",
}


def tokenizer_of(folder, markers):
    names = tuple(filter(None, (markers.prefix, markers.suffix, markers.middle, *markers.stops)))
    return load_tokenizer(write_json_tokenizer(folder, byte_level_json(("<|begin|>", "<|end|>", *names))))


@pytest.mark.parametrize("markers", [each for each in FAMILIES if each.prefix in WANTED], ids=lambda each: each.prefix)
def test_order_of_the_parts(tmp_path, markers):
    tokenizer = tokenizer_of(tmp_path, markers)
    ids = tokenizer.infill.encode(PREFIX, SUFFIX)
    assert "".join(map(tokenizer.token_text, ids)) == "<|begin|>" + WANTED[markers.prefix]
    assert [tokenizer.token_text(token) for token in tokenizer.infill.stop_ids] == [*markers.stops]


@pytest.mark.parametrize("markers", FAMILIES, ids=lambda each: each.prefix)
def test_markers_within_the_texts_are_plain_text(tmp_path, markers):
    tokenizer = tokenizer_of(tmp_path, markers)
    ids = tokenizer.infill.encode(f"a{markers.suffix}b", f"c{markers.prefix}")
    marker_ids = [tokenizer.piece_id(name) for name in (markers.prefix, markers.suffix)]
    assert sorted(token for token in ids if token in marker_ids) == sorted(marker_ids)


def test_suffix_of_codellama_has_no_space_before_it(tmp_path):
    names = "\u2581<PRE>,\u2581<SUF>,\u2581<MID>,\u2581<EOT>"
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path, user_defined_symbols=names))
    ids = tokenizer.infill.encode("To be", "be")
    pieces = [tokenizer.piece(token) for token in ids]
    assert pieces[:2] == ["<s>", "\u2581<PRE>"]
    assert "".join(pieces[2:]) == "\u2581To\u2581be\u2581<SUF>be\u2581<MID>"
    assert tokenizer.infill.stop_ids == (tokenizer.piece_id("\u2581<EOT>"),)


def test_vocabulary_without_markers_does_not_fill_in(tmp_path):
    assert load_tokenizer(write_sentencepiece(tmp_path)).infill is None
