"""The tokenizer of a GGUF file gives the ids of the tokenizer that it was made from."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from flambeau.llm.errors import TokenizerError
from flambeau.llm.text.gguf_splits import SPLITS
from flambeau.llm.text.tokenizer import load_tokenizer
from support.gguf_files import pieces_of, write_gguf
from support.tokenizer_files import LINES, sentencepiece_bytes, write_json_tokenizer, write_sentencepiece
from unit.llm.text.test_tokenizer import TEXTS

# As the models' own tokenizer.json have it.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace("{1,3}", "")
SAMPLES = [
    "",
    " ",
    "To be, or not to be",
    "  two  spaces ",
    "I'LL they've 12345 1234 ½ x²",
    "line\n\n  next\r\n\ttab",
    "emoji 👩‍🚀 ünïcödé 你好 ﬁ e\u0301",
    "<|im_start|>user<|im_end|>",
    "def f(x):\n    return x**2  # ok\n",
]


def write(folder, tokens, *, model, architecture="llama", **more):
    """A GGUF file with a vocabulary and next to no weights."""
    values = {"model": model, "tokens": tokens, **more}
    tokenizer = {(key if key.startswith("chat_") else f"ggml.{key}"): value for key, value in values.items()}
    folder.mkdir(exist_ok=True)
    write_gguf(folder / "model.gguf", architecture, {"a": torch.zeros(1)}, {}, tokenizer=tokenizer)
    return folder / "model.gguf"


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def pieces(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")
    options = {"add_dummy_prefix": request.param}
    original = load_tokenizer(write_sentencepiece(folder, **options))
    values = pieces_of(sentencepiece_bytes(**options))
    more = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": request.param}
    return original, load_tokenizer(write(folder / "gguf", model="llama", **values, **more))


@given(text=TEXTS)
def test_pieces_are_those_of_sentencepiece(pieces, text):
    original, found = pieces
    ids = original.encode(text)
    assert found.encode(text) == ids
    assert found.decode(ids) == original.decode(ids)


def test_special_pieces_are_known(pieces):
    original, found = pieces
    assert (found.bos_id, found.eos_id, found.unk_id) == (original.bos_id, original.eos_id, original.unk_id)
    assert found.eos_ids == {2}


def test_files_of_phi_3_are_read_with_their_names_and_what_fills_them_up(tmp_path):
    """Their unknown piece is said to be a control token, ids without a token are unknown, and names take spaces."""
    values = pieces_of(sentencepiece_bytes())
    values["token_type"][0] = 3
    for text, kind in {"<|user|>": 3, "<|end|>": 3, "[PAD402]": 2, "[PAD403]": 2}.items():
        values = {key: [*values[key], one] for key, one in zip(values, (text, -1000.0, kind), strict=True)}
    more = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True}
    template = "{% for m in messages %}<|user|>\n{{ m.content }}<|end|>\n{% endfor %}"
    path = write(tmp_path, model="llama", architecture="phi3", chat_template=template, **values, **more)
    found, original = load_tokenizer(path), load_tokenizer(write_sentencepiece(tmp_path))
    assert found.encode("To be [PAD402]") == original.encode("To be [PAD402]")
    user, end = found.special_id("<|user|>"), found.special_id("<|end|>")
    words = original.encode("To be", add_special=False)
    assert found.encode_chat([{"role": "user", "content": "To be"}]) == [user, *words, end]


def test_vocabularies_without_bytes_have_the_unknown_token_for_other_characters(tmp_path):
    options = {"byte_fallback": False}
    original = load_tokenizer(write_sentencepiece(tmp_path, **options))
    values = pieces_of(sentencepiece_bytes(**options))
    path = write(tmp_path / "gguf", model="llama", **values, bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    assert load_tokenizer(path).encode("To be 漢") == original.encode("To be 漢")


def test_a_vocabulary_with_some_of_the_bytes_is_refused_by_name(tmp_path):
    values = pieces_of(sentencepiece_bytes())
    values["token_type"][values["tokens"].index("<0x41>")] = 1
    path = write(tmp_path, model="llama", **values, bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    with pytest.raises(TokenizerError, match="255 of 256 bytes"):
        load_tokenizer(path)


def test_runs_of_spaces_are_the_tokens_of_gemma(tmp_path):
    """They are user-defined pieces, which a GGUF file has with plain spaces."""
    runs = ["\u2581\u2581", "\u2581" * 4, "\n\n"]
    options = {"user_defined_symbols": ",".join(runs), "add_dummy_prefix": False}
    original = load_tokenizer(write_sentencepiece(tmp_path, **options))
    values = pieces_of(sentencepiece_bytes(**options))
    for run in runs:
        place = values["tokens"].index(run)
        values["tokens"][place], values["token_type"][place] = run.replace("\u2581", " "), 4
    more = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": False}
    found = load_tokenizer(write(tmp_path / "gguf", model="llama", **values, **more))
    for text in (*SAMPLES, "if x:\n    return\n\n", "a  b    c     d", " ", "  "):
        ids = original.encode(text)
        assert found.encode(text) == ids
        assert found.decode(ids) == original.decode(ids) == text
    assert original.encode("a    b", add_special=False)[1] == original.piece_id(runs[1])


def test_merges_of_gemma_4_are_those_of_characters(tmp_path):
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    octets = [f"<0x{i:02X}>" for i in range(256)]
    original = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Replace(" ", "\u2581")
    original.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    original.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*special, *octets], show_progress=False)
    original.train_from_iterator([*LINES, *SAMPLES[:5] * 3], trainer)
    saved = json.loads(original.to_str())["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].get)
    kinds = [3 if token in special else 6 if token in octets else 1 for token in tokens]
    more = {"merges": [" ".join(merge) for merge in saved["merges"]], "token_type": kinds, "add_space_prefix": False}
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3}
    path = write(tmp_path, tokens, model="gemma4", architecture="gemma4", **more, **ids)
    found = load_tokenizer(path)
    own = Tokenizer.from_str(original.to_str())
    own.add_special_tokens(special)
    for text in (*SAMPLES, "<|turn>user\n\nTo be<turn|>\n"):
        expected = own.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special=False) == expected
        assert found.encode(text) == [2, *expected]
        text = own.decode(expected, skip_special_tokens=False)
        assert found.decode(expected) == text.replace("<|turn>", "").replace("<turn|>", "")


def trained(pattern):
    """A byte-level tokenizer with a rule to split text, trained with it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pattern == LLAMA_3))
    steps = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*LINES, *SAMPLES * 3], trainer)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def values_of(tokenizer):
    described = json.loads(tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    kinds = {one["content"]: 3 if one["special"] else 4 for one in described["added_tokens"]}
    merges = [" ".join(merge) for merge in described["model"]["merges"]]
    return {"tokens": tokens, "merges": merges, "token_type": [kinds.get(token, 1) for token in tokens]}


@pytest.fixture(scope="module", params=[("llama-bpe", LLAMA_3), ("qwen2", QWEN)], ids=["llama 3", "qwen 2"])
def byte_level(request, tmp_path_factory):
    name, pattern = request.param
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer = trained(pattern)
    begin, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    more = {"pre": name, "bos_token_id": begin, "eos_token_id": end, "add_bos_token": False}
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    original = load_tokenizer(write_json_tokenizer(folder, tokenizer.to_str(), **names))
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    values = {**values_of(tokenizer), **more, "chat_template": template}
    return original, load_tokenizer(write(folder / "gguf", model="gpt2", **values))


@pytest.mark.parametrize("text", SAMPLES)
def test_byte_level_ids_are_those_of_tokenizer_json(byte_level, text):
    original, found = byte_level
    if "e\u0301" in text and found.encode("e\u0301") != original.encode("e\u0301"):
        text = text.replace("e\u0301", "é")  # Qwen composes characters
    ids = original.encode(text)
    assert found.encode(text) == ids
    assert found.decode(ids) == original.decode(ids)
    assert [found.token_bytes(i) for i in ids] == [original.token_bytes(i) for i in ids]


def test_the_chat_template_is_in_the_file(byte_level):
    _, found = byte_level
    ids = found.encode_chat([{"role": "user", "content": "To be<|im_end|>"}])
    assert ids[0] == found.special_id("<|im_start|>")
    assert ids[-1] == found.eos_id
    assert ids.count(found.eos_id) == 1  # that in the message is text


def test_texts_of_llama_3_begin_with_bos(tmp_path):
    tokenizer = trained(LLAMA_3)
    begin = tokenizer.token_to_id("<|im_start|>")
    path = write(tmp_path, model="gpt2", pre="llama-bpe", bos_token_id=begin, **values_of(tokenizer))
    found = load_tokenizer(path)
    assert found.encode("To be")[0] == begin == found.bos_id
    assert found.eos_ids == {tokenizer.token_to_id("<|im_end|>")}  # known by its name


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["<|start|>", "<|end|>", "<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),  # gpt-oss
        (["<|end|>", "<|user|>"], {"<|end|>"}),
        (["<|eot|>", "<|eom|>"], {"<|eot|>", "<|eom|>"}),
    ],
)
def test_control_tokens_that_end_a_reply_are_known(tmp_path, names, ends):
    tokens = ["a", *names]
    kinds = [1, *[3] * len(names)]
    path = write(tmp_path, tokens, model="gpt2", pre="gpt-2", merges=[], token_type=kinds)
    assert {tokens[i] for i in load_tokenizer(path).eos_ids} == ends


SAMPLE = "I'LL pay $1234.50 for  two—HTTP servers;\n\n  你好 世界カナ a1b22"
PIECES = {  # of the sample, as llama.cpp splits it
    "llama-bpe": "I|'LL| pay| $|123|4|.|50| for| | two|—HTTP| servers|;\n\n| | 你好| 世界カナ| a|1|b|22",
    "qwen2": "I|'LL| pay| $|1|2|3|4|.|5|0| for| | two|—HTTP| servers|;\n\n| | 你好| 世界カナ| a|1|b|2|2",
    "gpt-4o": "I'LL| pay| $|123|4|.|50| for| | two|—HTTP| servers|;\n\n| | 你好| 世界カナ| a|1|b|22",
    "gpt-2": "I|'|LL| pay| $|1234|.|50| for| | two|—|HTTP| servers|;|\n\n | 你好| 世界カナ| a|1|b|22",
    "starcoder": "I|'|LL| pay| $|1|2|3|4|.|5|0| for| | two|—|HTTP| servers|;|\n\n | 你好| 世界カナ| a|1|b|2|2",
    "superbpe": "I'LL pay $|1|234|.|50| for  two—HTTP servers;\n\n  你好 世界カナ a|1|b|22",
    "falcon": "I|'|LL| pay| |$|123|4|.|50| for| | two|—|HTTP| servers|;|\n\n | 你好| 世界カナ| a|1|b|22",
    "bloom": "I'LL| pay| $1234|.|50| for| | two—HTTP| servers;|\n\n | 你好| 世界カナ| a1b22",
    "viking": "I'LL| pay| $|1|2|3|4|.|5|0| for| | two—HTTP| servers;|\n\n | 你好| 世界カナ| a|1|b|2|2",
    "deepseek-llm": "I|'|LL| pay| $|1|2|3|4|.|5|0| for| | two|—|HTTP| servers|;|\n|\n|  |你好| |世界カナ| a|1|b|2|2",
    "deepseek-coder": "I|'|LL| pay| $|1|2|3|4|.|5|0| for| | two|—|HTTP| servers|;|\n|\n| | |你好| |世界カナ| a|1|b|2|2",
    "deepseek-v3": "I|'LL| pay| $|123|4|.|50| for| | two|—|HTTP| servers|;\n\n|  |你好| |世界カナ| a|1|b|22",
    "kimi-k2": "I'LL| pay| $|123|4|.|50| for| | two|—HTTP| servers|;\n\n| | |你好| |世界|カナ| a|1|b|22",
    "youtu": "I'LL| pay| $|1|2|3|4|.|5|0| for| | two|—|HTTP| servers|;\n\n|  |你好| |世界カナ| a|1|b|2|2",
    "seed-coder": "I|'LL| pay| $|1|2|3|4|.|5|0| for| | two|—HTTP| servers|;|\n\n| | 你好| 世界カナ| a|1|b|2|2",
    "tiny_aya": "I'LL| pay| $|1|234|.|50| for| | two|—HTTP| servers|;\n\n| | 你好| 世界カナ| a|1|b|22",
}
ALIASES = {
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4 glm5 "
    "minicpm5 jais-2",
    "qwen2": "deepseek-r1-qwen stablelm2 hunyuan solar-open megrez kormo grok-2 qwen35 tekken bailingmoe bailingmoe2 "
    "llada-moe",
    "gpt-4o": "llama4 kanana2 minimax-m2",
    "gpt-2": "phi-2 exaone4 gigachat a.x-4.0 mellum trillion granite-docling mpt olmo jais",
    "starcoder": "smollm refact codeshell exaone minerva-7b mellum2 command-r",
    "bloom": "poro-chat gpt3-finnish",
    "deepseek-v3": "hunyuan-dense joyai-llm",
}


def test_every_rule_splits_text_as_llama_cpp_does(tmp_path):
    """Whole pieces are tokens here, so that ids show where a text is split."""
    expected = {**PIECES, **{name: PIECES[rule] for rule, names in ALIASES.items() for name in names.split()}}
    assert expected.keys() == SPLITS.keys() - {"exaone-moe"}  # below: its pieces have several words
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name, pieces in expected.items():
        encoded = ["".join(text for text, _ in to_bytes.pre_tokenize_str(piece)) for piece in pieces.split("|")]
        tokens, merges = grown(encoded)
        found = load_tokenizer(write(tmp_path, tokens, model="gpt2", pre=name, merges=merges, add_bos_token=False))
        assert [tokens[i] for i in found.encode(SAMPLE)] == encoded, name


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        (
            "exaone-moe",
            SAMPLE,
            "I|'LL| pay| $|1|2|3|4|.|5|0| for| | two|—HTTP servers|;\n|\n| | 你好 世界カナ a|1|b|2|2",
        ),
        ("jais-2", f"a{' ' * 7}b{' ' * 600}", f"a|{' ' * 4}|  | b|{' ' * 512}|{' ' * 64}|{' ' * 16}|{' ' * 8}"),
    ],
)
def test_words_and_spaces_are_split_by_the_rule(name, text, pieces):
    splitter = pre_tokenizers.Split(Regex(SPLITS[name].steps[0]), "isolated")
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == pieces.split("|")


def grown(words):
    """A vocabulary that has these words, each made from left to right, and the whole text that they make."""
    tokens, merges = dict.fromkeys(pre_tokenizers.ByteLevel.alphabet()), {}
    for word in (*words, "".join(words)):
        for end in range(2, len(word) + 1):
            tokens[word[:end]] = None
            merges[f"{word[: end - 1]} {word[end - 1]}"] = None
    return list(tokens), list(merges)


def test_the_rules_of_gpt_2_are_those_of_the_library(tmp_path):
    tokenizer = trained(LLAMA_3)
    for name, steps in {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "deepseek-coder": [
            *(pre_tokenizers.Split(Regex(rule), "isolated") for rule in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")),
            pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-\ud7ff]+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }.items():
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        described = json.loads(tokenizer.to_str())
        described["model"]["ignore_merges"] = False
        original = Tokenizer.from_str(json.dumps(described))
        found = load_tokenizer(write(tmp_path / name, model="gpt2", pre=name, **values_of(tokenizer)))
        for text in SAMPLES:
            assert found.encode(text) == original.encode(text).ids


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model": "gpt2", "pre": "martian", "tokens": ["a"]}, "'martian'"),
        ({"model": "gpt2", "tokens": ["a"]}, "'default'.*tokenizer_path"),
        ({"model": "rwkv", "tokens": ["a"]}, "'rwkv'.*tokenizer_path"),
        ({"model": "llama", "tokens": ["a"]}, "SentencePiece"),
        ({"model": "gpt2", "pre": "gpt-2", "tokens": ["a"], "merges": ["b c"]}, "cannot be used"),
        ({"model": "llama", "tokens": ["a", "b"], "scores": [0.0]}, "1 scores"),
        ({"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "token_type": [1]}, "1 types"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, values, named):
    with pytest.raises(TokenizerError, match=named):
        load_tokenizer(write(tmp_path, **values))
