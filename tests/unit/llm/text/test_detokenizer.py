"""Detokenizer: exact text, token by token."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flambeau.llm.text.detokenizer import WindowDecoder
from flambeau.llm.text.tokenizer import load_tokenizer
from support.tokenizer_files import byte_level_json, llama_json, write_json_tokenizer, write_sentencepiece

CHARACTERS = st.one_of(
    st.sampled_from([*" \n'abeorst", "🎉", "👩‍👩‍👧", "日本", "e\u0301", "\ufffd", "ß", "  ", "to be"]),
    st.characters(exclude_categories=("Cs",), exclude_characters="\u2581\0\u0007"),
)
TEXTS = st.lists(CHARACTERS, max_size=30).map("".join)
SIZES = st.lists(st.integers(1, 4), max_size=40)
NAMES = st.sampled_from(["pieces", "collapsing", "byte level", "llama", "window"])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    from tokenizers import Tokenizer, decoders

    # A decoder that is not known by name goes through the window.
    strange = Tokenizer.from_str(byte_level_json())
    strange.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\u0007", "")])
    new_folder = tmp_path_factory.mktemp
    folders = {
        "pieces": write_sentencepiece(new_folder("pieces")),
        "collapsing": write_sentencepiece(new_folder("collapsing"), remove_extra_whitespaces=True),
        "byte level": write_json_tokenizer(new_folder("bytes"), byte_level_json()),
        "llama": write_json_tokenizer(new_folder("llama"), llama_json()),
        "window": write_json_tokenizer(new_folder("window"), strange.to_str()),
    }
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


def chunks(ids, sizes):
    """The ids in groups of these sizes, then one by one."""
    at = 0
    for size in sizes:
        if at < len(ids):
            yield ids[at : at + size]
            at += size
    yield from ([i] for i in ids[at:])


def streamed(stream, groups):
    texts = [stream.push(group) for group in groups]
    return "".join([*texts, stream.flush()])


def after_prompt(tokenizer, prompt, ids):
    """What the ids add to the text of a prompt that ends with a whole character."""
    return tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]


@given(name=NAMES, prompt=TEXTS, text=TEXTS, sizes=SIZES)
@example(name="pieces", prompt="", text=" to be", sizes=[])
@example(name="pieces", prompt="To", text="to be", sizes=[])
@example(name="llama", prompt="x", text="🎉🎉", sizes=[3, 3])
@example(name="window", prompt="", text="\ufffd\ufffd🎉", sizes=[])
def test_pieces_are_together_the_whole_text(tokenizers, name, prompt, text, sizes):
    tokenizer = tokenizers[name]
    before, ids = tokenizer.encode(prompt), tokenizer.encode(text, add_special=False)
    stream = tokenizer.detokenizer(before)
    assert streamed(stream, chunks(ids, sizes)) == after_prompt(tokenizer, before, ids)


@given(name=NAMES.filter(lambda name: name != "window"), ids=st.lists(st.integers(0, 450), max_size=20), data=st.data())
def test_any_tokens_in_a_row_even_broken_characters_are_exact(tokenizers, name, ids, data):
    tokenizer = tokenizers[name]
    cut = data.draw(st.integers(0, len(ids)))
    alone = tokenizer.detokenizer(())
    given_before = "".join(alone.push([i]) for i in ids[:cut])  # without half a character at the end of the prompt
    new = streamed(tokenizer.detokenizer(ids[:cut]), [[i] for i in ids[cut:]])
    assert given_before + new == tokenizer.decode(ids)


def test_the_window_gives_broken_characters_sooner_or_later(tokenizers):
    tokenizer = tokenizers["window"]
    first = tokenizer.encode("🎉", add_special=False)[0]
    stream = tokenizer.detokenizer(())
    assert streamed(stream, [[first]] * 100) == "\ufffd" * 100


@pytest.mark.parametrize("name", ["pieces", "byte level", "llama", "window"])
def test_half_a_character_is_held_back(tokenizers, name):
    tokenizer = tokenizers[name]
    prompt = tokenizer.encode("x")
    *first, last = tokenizer.encode("🎉", add_special=False)
    stream = tokenizer.detokenizer(prompt)
    assert stream.push(first).strip(" ") == ""
    assert stream.push([last]) == "🎉"
    stream = tokenizer.detokenizer(prompt)
    stream.push(first)
    assert stream.flush() == "\ufffd" * (3 if name in ("pieces", "llama") else 1)


@pytest.mark.parametrize("name", ["pieces", "byte level", "llama"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_character_that_began_in_the_prompt_is_completed(tokenizers, name, cut):
    tokenizer = tokenizers[name]
    ids = tokenizer.encode("to be 🎉")
    assert streamed(tokenizer.detokenizer(ids[:-cut]), [[i] for i in ids[-cut:]]) == "🎉"


@pytest.mark.parametrize("name", ["pieces", "llama"])
def test_space_of_the_first_piece_is_kept_only_after_a_text(tokenizers, name):
    tokenizer = tokenizers[name]
    ids = tokenizer.encode("to be", add_special=False)
    assert tokenizer.token_text(ids[0]).startswith(" ")
    assert streamed(tokenizer.detokenizer(tokenizer.encode("or not")), [ids]) == " to be"
    assert streamed(tokenizer.detokenizer([1]), [ids]) == "to be"


def test_special_tokens_are_left_out(tokenizers):
    tokenizer = tokenizers["byte level"]
    ids = tokenizer.encode("to<|im_end|>be", add_special=False)
    assert streamed(tokenizer.detokenizer(()), [[i] for i in ids]) == "tobe"


def first_stop(text, stops):
    """Where the stop that is complete first begins and ends, by trying every end."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins), end
    return None


@given(
    name=NAMES,
    text=st.text("aab \n🎉", max_size=40),
    stops=st.lists(st.text("ab \n🎉", min_size=1, max_size=4), max_size=3),
    sizes=SIZES,
    include=st.booleans(),
)
@example(name="byte level", text="aaab", stops=["aab", "abb"], sizes=[], include=False)
@example(name="byte level", text="aab", stops=["b", "ab"], sizes=[], include=False)
def test_text_is_cut_at_the_stop_that_is_complete_first(tokenizers, name, text, stops, sizes, include):
    tokenizer = tokenizers[name]
    before, ids = tokenizer.encode("x"), tokenizer.encode(text, add_special=False)
    whole = after_prompt(tokenizer, before, ids)
    stream = tokenizer.detokenizer(before, stop=stops, include_stop=include)
    found = first_stop(whole, stops)
    expected = whole if found is None else whole[: found[1] if include else found[0]]
    assert streamed(stream, chunks(ids, sizes)) == expected
    assert stream.stopped == (found is not None)


def test_what_may_begin_a_stop_is_held_back_and_what_cannot_is_given(tokenizers):
    tokenizer = tokenizers["byte level"]
    stream = tokenizer.detokenizer((), stop=["###"])
    letters = {c: tokenizer.encode(c, add_special=False) for c in "ab#"}
    assert [stream.push(letters[c]) for c in "a##b#"] == ["a", "", "", "##b", ""]
    assert not stream.stopped
    assert stream.flush() == "#"


def test_tokens_after_the_stop_are_not_counted(tokenizers):
    tokenizer = tokenizers["byte level"]
    ids = [i for c in "ab#cd" for i in tokenizer.encode(c, add_special=False)]
    stream = tokenizer.detokenizer((), stop=["#"])
    assert stream.push(ids[:1]) == "a"
    assert stream.stopped_after is None
    assert stream.push(ids[1:]) == "b"
    assert (stream.stopped, stream.stopped_after, stream.stopped_by) == (True, 2, "#")
    assert (stream.push(ids), stream.flush()) == ("", "")


@pytest.mark.parametrize("include", [False, True])
def test_the_name_of_a_special_token_is_a_stop_too(tokenizers, include):
    tokenizer = tokenizers["byte level"]
    ids = tokenizer.encode("to<|im_end|>be", add_special=False)
    stream = tokenizer.detokenizer((), stop=["<|im_end|>", "toto"], include_stop=include)
    assert stream.push(ids) == ("to<|im_end|>" if include else "to")
    assert stream.stopped_after == ids.index(tokenizer.special_id("<|im_end|>")) + 1


@pytest.mark.parametrize("name", ["byte level", "window"])
def test_the_names_of_special_tokens_are_text_if_that_is_asked_for(tokenizers, name):
    tokenizer = tokenizers[name]
    ids = tokenizer.encode("to<|im_end|> be 🎉<|end|>", add_special=False)
    for size in (1, 2, len(ids)):
        parts = [ids[i : i + size] for i in range(0, len(ids), size)]
        assert streamed(tokenizer.detokenizer((), skip_special=False), parts) == "to<|im_end|> be 🎉<|end|>"
        assert streamed(tokenizer.detokenizer(()), parts) == "to be 🎉"
    own = {tokenizer.special_id("<|end|>"): "THE END"}
    assert streamed(tokenizer.detokenizer((), skip_special=False, marker_texts=own), [ids]).endswith("🎉THE END")
    stream = tokenizer.detokenizer((), skip_special=False, stop=["<|im_end|>"])
    assert (stream.push(ids), stream.stopped_by) == ("to", "<|im_end|>")


def test_work_per_token_does_not_grow_with_the_text():
    decoded = 0

    def decode(ids):
        nonlocal decoded
        decoded += len(ids)
        return "x" * len(ids)

    characters = WindowDecoder(decode)
    assert "".join(characters.push(1) for _ in range(1000)) == "x" * 1000
    assert decoded <= 1000 * 2 * WindowDecoder.CONTEXT
