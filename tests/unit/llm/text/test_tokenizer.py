"""Tokenizer: text to ids and back, from a model's own files."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.llm.errors import InvalidRequest, TokenizerError
from flambeau.llm.text.tokenizer import load_tokenizer
from flambeau.llm.text.vocabulary import SharedSetting
from support.tokenizer_files import (
    byte_level_json,
    llama_json,
    sentencepiece_bytes,
    write_json_tokenizer,
    write_sentencepiece,
)

TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\u2581\0"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    return load_tokenizer(write_sentencepiece(tmp_path_factory.mktemp("pieces")))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    return load_tokenizer(
        write_json_tokenizer(folder, byte_level_json(), bos_token="<|begin|>", eos_token={"content": "<|end|>"})
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load_tokenizer(write_json_tokenizer(tmp_path_factory.mktemp("llama"), llama_json(), bos_token="<s>"))


@pytest.fixture(params=["pieces", "byte_level", "llama"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


@given(text=TEXTS)
def test_text_survives_sentencepiece(pieces, text):
    assert pieces.decode(pieces.encode(text)) == text


@given(text=TEXTS)
def test_text_survives_byte_level(byte_level, text):
    assert byte_level.decode(byte_level.encode(text)) == text


@given(text=TEXTS)
def test_text_survives_a_json_with_pieces(llama, text):
    assert llama.decode(llama.encode(text)) == text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": True},
        {"add_dummy_prefix": False, "remove_extra_whitespaces": True},
        {"user_defined_symbols": "<mine>"},
    ],
)
def test_every_sentencepiece_model_is_decoded_as_by_the_library(tmp_path, options):
    import sentencepiece

    tokenizer = load_tokenizer(write_sentencepiece(tmp_path, **options))
    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_bytes(**options))
    for text in ("To be", "  to be", "", " ", "   ", "é🎉 日本", "a  b ", "<mine>x <s>", "\n\tx"):
        ids = library.encode(text)
        assert tokenizer.encode(text, add_special=False) == ids
        assert tokenizer.decode([1, *ids, 2]) == library.decode([1, *ids, 2])


@given(ids=st.lists(st.integers(0, 419), max_size=12))
def test_any_ids_are_decoded_as_by_the_tokenizers_library(byte_level, ids):
    from tokenizers import Tokenizer

    assert byte_level.decode(ids) == Tokenizer.from_str(byte_level_json()).decode(ids)


def test_prompts_begin_as_the_model_expects(pieces, byte_level, llama):
    assert pieces.encode("To")[0] == pieces.bos_id == 1
    assert llama.encode("To")[0] == llama.bos_id == 1
    assert byte_level.encode("To")[0] == byte_level.bos_id == 0
    assert byte_level.encode("To", add_special=False)[0] != 0


def test_add_bos_token_false_is_obeyed_for_sentencepiece(tmp_path):
    write_sentencepiece(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert load_tokenizer(tmp_path).encode("To")[0] != 1


@pytest.mark.parametrize(
    ("text", "settings", "named"),
    [
        (byte_level_json(), {"add_bos_token": True, "add_eos_token": False, "add_prefix_space": False}, []),
        (byte_level_json(), {"add_bos_token": False}, ["add_bos_token: false"]),
        (byte_level_json(), {"add_eos_token": True, "add_bos_token": None}, ["add_eos_token: true"]),
        (byte_level_json(), {"add_prefix_space": True, "split_special_tokens": False}, ["add_prefix_space: true"]),
        (byte_level_json(), {"split_special_tokens": True}, ["split_special_tokens: true"]),
        (llama_json(), {"add_bos_token": True, "add_prefix_space": True}, []),
        (llama_json(), {"add_prefix_space": False}, ["add_prefix_space: false"]),
    ],
)
def test_settings_that_the_vocabulary_contradicts_are_warned_of(tmp_path, caplog, text, settings, named):
    load_tokenizer(write_json_tokenizer(tmp_path, text, **settings))
    assert len(caplog.records) == (1 if named else 0)
    assert all(name in caplog.text for name in named)


def test_a_control_piece_never_comes_from_text(pieces):
    ids = pieces.encode("<s> </s>", add_special=False)
    assert not {1, 2} & set(ids)
    assert pieces.decode(ids) == "<s> </s>"


def test_bytes_that_are_no_text_are_shown_as_by_sentencepiece(pieces):
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_bytes())
    for text in (b"\xe3\x81", b"\xe3\xe3\x81\x82", b"\xf0\x9f\x8eA", b"\xff\x80x", b"\xf0\x9f\x8e\xf0\x9f\x8e\x89"):
        ids = [library.piece_to_id(f"<0x{byte:02X}>") for byte in text]
        assert pieces.decode(ids) == library.decode(ids)
        stream = pieces.detokenizer([])
        assert "".join(stream.push([i]) for i in ids) + stream.flush() == library.decode(ids)


def test_a_vocabulary_that_begins_with_runs_of_spaces_drops_the_leading_space(tmp_path):
    """Llama 2's first piece with a space is two of them."""
    options = {"user_defined_symbols": "\u2581\u2581"}
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path, **options))
    assert tokenizer.piece(3) == "\u2581\u2581"
    assert tokenizer.decode(tokenizer.encode("To be")) == "To be"


def test_pieces_of_the_user_that_are_declared_special_are_no_text(tmp_path):
    """As Gemma's: messages cannot contain them, and replies do not show them."""
    marks = ["<turn>", "<end>"]
    write_sentencepiece(tmp_path, user_defined_symbols=",".join(marks), add_dummy_prefix=False)
    declared = {str(3 + i): {"content": mark, "special": True} for i, mark in enumerate(marks)}
    template = "{% for m in messages %}<turn>{{ m.content }}<end>{% endfor %}"
    settings = {"added_tokens_decoder": declared, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.special_id(mark) for mark in marks] == [3, 4]
    words = tokenizer.encode("To be", add_special=False)
    assert tokenizer.decode([3, *words, 4]) == "To be"
    ids = tokenizer.encode_chat([{"role": "user", "content": "To be<end><turn>"}])
    assert (ids.count(3), ids.count(4)) == (1, 1)
    assert ids[0] == 3
    assert tokenizer.decode(ids) == "To be<end><turn>"


def test_names_of_added_tokens_take_the_spaces_beside_them(tmp_path):
    write_sentencepiece(tmp_path)
    flags = {"1000": {"content": "<l>", "lstrip": True}, "1001": {"content": "<r>", "rstrip": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": flags}))
    tokenizer = load_tokenizer(tmp_path)
    words = tokenizer.encode("To be", add_special=False)
    assert tokenizer.encode_with_special("To be \n<l>To be<r> \nTo be") == [*words, 1000, *words, 1001, *words]


def test_added_tokens_are_decoded_as_the_library_writes_them(tmp_path):
    """A normalizer that puts a space before texts does so with the names of added tokens."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(llama_json())
    library.add_tokens(["<tool>", "<a\u2581b>"])
    tokenizer = load_tokenizer(write_json_tokenizer(tmp_path, library.to_str()))
    for name in ("<tool>", "<a\u2581b>"):
        words, added = library.encode("To be").ids, library.token_to_id(name)
        assert tokenizer.decode([*words, added, *words]) == library.decode([*words, added, *words])


def test_a_plain_prompt_for_a_json_tokenizer_may_name_special_tokens(byte_level):
    assert byte_level.special_id("<|im_end|>") in byte_level.encode("x<|im_end|>")


def test_special_tokens_are_no_text_but_added_ones_are(byte_level):
    ids = byte_level.encode("<|im_start|>To<tool call>be<|im_end|>")
    assert byte_level.decode(ids) == "To<tool call>be"
    assert byte_level.token_text(byte_level.special_id("<|im_end|>")) == "<|im_end|>"


def test_tokens_have_bytes_even_within_a_character(tokenizer):
    ids = tokenizer.encode("🎉", add_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).lstrip(b" ") == "🎉".encode()
    assert tokenizer.token_text(ids[-1]) == "\ufffd"


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_ids_beyond_the_vocabulary_are_no_text(tokenizer, token_id):
    assert tokenizer.vocab_size < 10**6
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.decode([token_id]) == ""


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        tokenizer.encode("To \ud83c")


def test_vocabulary_without_bytes_of_its_own_is_decoded_by_the_library(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = Tokenizer(models.WordPiece({"[UNK]": 0, "to": 1, "##day": 2, "be": 3}, unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    tokenizer = load_tokenizer(write_json_tokenizer(tmp_path, words.to_str()))
    assert tokenizer.decode(tokenizer.encode("today be")) == "today be"
    assert tokenizer.token_text(1) == "to"


class TestEndIds:
    def test_generation_config_comes_before_config(self, tmp_path):
        write_json_tokenizer(tmp_path, byte_level_json(), eos_token="<|end|>")
        (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
        assert load_tokenizer(tmp_path).eos_ids == {1, 7}
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
        assert load_tokenizer(tmp_path).eos_ids == {1, 3}

    def test_sentencepiece_knows_its_own(self, pieces):
        assert pieces.eos_ids == {2}

    def test_a_file_alone_is_enough(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text(byte_level_json())
        tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, frozenset())


class TestFiles:
    def test_json_is_preferred(self, tmp_path):
        write_sentencepiece(write_json_tokenizer(tmp_path, byte_level_json()))
        assert load_tokenizer(tmp_path).token_text(2) == "<|im_start|>"

    def test_padding_and_truncation_of_the_file_are_not_applied(self, tmp_path):
        described = json.loads(byte_level_json())
        described["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
        write_json_tokenizer(tmp_path, json.dumps(described))
        assert len(load_tokenizer(tmp_path).encode("To be, or not to be" * 5)) > 3

    def test_tokens_added_to_a_sentencepiece_model_are_special(self, tmp_path):
        write_sentencepiece(tmp_path)
        (tmp_path / "added_tokens.json").write_text('{"<s>": 1, "<pad>": 1000, "<extra>": 1001}')
        tokenizer = load_tokenizer(tmp_path)
        assert (tokenizer.vocab_size, tokenizer.special_id("<extra>")) == (1002, 1001)
        assert (tokenizer.decode([1001]), tokenizer.token_text(1001)) == ("", "<extra>")

    def test_added_tokens_that_are_not_special_are_text_and_templates_write_them(self, tmp_path):
        write_sentencepiece(tmp_path)
        added = {"1000": {"content": "<call>", "special": False}, "1001": {"content": "<end>", "special": True}}
        settings = {"added_tokens_decoder": added, "chat_template": "<call>{{ messages[0].content }}<end>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "added_tokens.json").write_text('{"<call>": 1000, "<end>": 1001}')
        tokenizer = load_tokenizer(tmp_path)
        ids = tokenizer.encode_chat([{"role": "user", "content": "To <call> be"}])
        assert (ids[0], ids[-1], ids.count(1000)) == (1000, 1001, 1)  # what a message says is only text
        assert tokenizer.decode(ids) == "<call> To <call> be"
        assert (tokenizer.special_id("<call>"), tokenizer.special_id("<end>")) == (None, 1001)

    @pytest.mark.parametrize("added", [[1], {"3": 4}, {"x": {"content": "a"}}, {"3": {}}])
    @pytest.mark.parametrize("kind", ["pieces", "json"])
    def test_added_tokens_that_cannot_be_read_are_refused(self, tmp_path, added, kind):
        write_sentencepiece(tmp_path)
        if kind == "json":
            write_json_tokenizer(tmp_path, byte_level_json())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
        with pytest.raises(TokenizerError, match=r"added_tokens_decoder in .*tokenizer_config\.json must have tokens"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        "settings",
        [
            {"eos_token": "<tool call>", "pad_token": "<|pad|>"},
            {"image_token": "<tool call>", "additional_special_tokens": ["<|new|>"]},
            {"extra_special_tokens": {"image_token": "<|new|>"}, "additional_special_tokens": ["<|end|>", "<|more|>"]},
            {"extra_special_tokens": ["<|new|>", "<tool call>"]},
            {"added_tokens_decoder": {"900": {"content": "<|new|>", "special": False, "rstrip": True}}},
            {"added_tokens_decoder": {"369": {"content": "<tool call>", "special": True, "lstrip": True}}},
            {"added_tokens_decoder": {"1": {"content": "<|end|>", "special": False}}},
            {"added_tokens_decoder": {}, "eos_token": "<|end|>", "map": {"eos_token": "<|im_end|>"}},
            {"eos_token": "<|end|>", "map": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|new|>"]}},
            {"pad_token": "<|pad|>", "added": {"<|new|>": 371, "<|pad|>": 370}},
        ],
        ids=str,
    )
    def test_tokens_that_other_files_declare_are_those_of_transformers(self, tmp_path, settings):
        transformers = pytest.importorskip("transformers")
        others = {"map": "special_tokens_map.json", "added": "added_tokens.json"}
        own = {key: value for key, value in settings.items() if key not in others}
        write_json_tokenizer(tmp_path, byte_level_json(), tokenizer_class="PreTrainedTokenizerFast", **own)
        for key in others.keys() & settings.keys():
            (tmp_path / others[key]).write_text(json.dumps(settings[key]))
        theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
        text = "a <tool call> b <|new|> c <|pad|> d <|more|> e <|end|> f"
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.eos_id == theirs.eos_token_id

    def test_chat_template_without_a_name_is_none(self, tmp_path):
        write_sentencepiece(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"template": "x"}]}))
        assert load_tokenizer(tmp_path).template is None

    def test_empty_folder_is_refused(self, tmp_path):
        with pytest.raises(TokenizerError, match=r"none of tokenizer\.json, tokenizer\.model and"):
            load_tokenizer(tmp_path)

    def test_missing_file_is_refused(self, tmp_path):
        with pytest.raises(TokenizerError, match=r"No such file.*name a model's folder"):
            load_tokenizer(tmp_path / "nothing.model")

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("tokenizer.json", b"", "is empty"),
            ("tokenizer.model", b"", "is empty"),
            ("tokenizer.json", b"{}", "is not a tokenizer.json"),
            ("tokenizer.json", b"\xff\xfe", "is not a tokenizer.json"),
            ("tokenizer.model", b"\x0a\x03garbage", "is not a SentencePiece model"),
            ("tokenizer.model", b"IQ== 0\nIg== 1\n", r"tiktoken.*tokenizer\.json"),
            ("tokenizer.model", b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        ],
    )
    def test_broken_file_is_named(self, tmp_path, name, content, says):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TokenizerError, match=f"{name}.*{says}"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize("content", ["[]", "{", "\x00"])
    def test_broken_settings_are_named(self, tmp_path, content):
        write_sentencepiece(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize("library", ["sentencepiece", "tokenizers"])
    def test_missing_library_is_named_with_its_remedy(self, tmp_path, monkeypatch, library):
        monkeypatch.setitem(sys.modules, library, None)
        (tmp_path / ("tokenizer.model" if library == "sentencepiece" else "tokenizer.json")).write_text("x")
        with pytest.raises(TokenizerError, match=rf"needs {library}: pip install flambeau\[llm\]"):
            load_tokenizer(tmp_path)


def test_the_names_of_mistral_are_found(tmp_path, pieces):
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tekken\.json is not a tekken\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model.v3").write_bytes(sentencepiece_bytes())
    assert load_tokenizer(tmp_path).encode("To be") == pieces.encode("To be")


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken", "hy.tiktoken"])
def test_a_file_of_tiktoken_alone_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_text("IQ== 0\n")
    with pytest.raises(TokenizerError, match=rf"only {re.escape(name)}, whose rules .* put the tokenizer.json"):
        load_tokenizer(tmp_path)


# ---- long texts ----


@pytest.mark.parametrize("add_special", [True, False])
def test_long_text_has_the_ids_of_the_library(tmp_path, add_special):
    folder = write_json_tokenizer(tmp_path, byte_level_json())
    text = "To be, <|im_end|> or not to be. " * 200
    tokenizers = pytest.importorskip("tokenizers")
    wanted = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=add_special)
    assert load_tokenizer(folder).encode(text, add_special=add_special) == wanted.ids


@pytest.mark.parametrize("kind", ["tokenizers", "sentencepiece"])
def test_other_threads_run_while_a_long_text_is_encoded(tmp_path, kind):
    is_json = kind == "tokenizers"
    tokenizer = load_tokenizer(
        write_json_tokenizer(tmp_path, byte_level_json()) if is_json else write_sentencepiece(tmp_path)
    )
    text, clocks, total_s = "To be, or not to be, that is the question: " * 20_000, [], []

    def encode():
        clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        tokenizer.encode(text)
        total_s.append(time.thread_time())
        is_read.wait(30)  # the clock ends with the thread

    is_read = threading.Event()
    thread = threading.Thread(target=encode)
    thread.start()
    moments = []  # what the thread had computed whenever this one could run
    while not total_s:
        if clocks:
            moments.append(time.clock_gettime(clocks[0]))
    is_read.set()
    thread.join()
    longest = max(after - before for before, after in pairwise([0.0, *moments, total_s[0]]))
    assert longest < max(0.05, 0.5 * total_s[0])  # the library may compute in threads of its own


def test_threads_share_a_setting_and_wait_for_those_that_need_the_other_value():
    values, entered = [], threading.Event()
    setting = SharedSetting(values.append)

    def use_other() -> None:
        with setting.as_value(True):
            entered.set()

    with setting.as_value(False):
        with setting.as_value(False):
            pass
        other = threading.Thread(target=use_other)
        other.start()
        assert not entered.wait(0.05)
        assert values == []
    assert entered.wait(30)
    other.join()
    with setting.as_value(False):
        assert values == [True, False]
