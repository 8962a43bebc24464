"""tekken.json and tiktoken.model give the ids of tiktoken's algorithm; Mistral's chats are those of mistral-common."""

from __future__ import annotations

import base64
import json
import random
from itertools import pairwise

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
regex = pytest.importorskip("regex")

from flambeau.llm.chat.chat_format import ChatFormat  # noqa: E402
from flambeau.llm.errors import TokenizerError  # noqa: E402
from flambeau.llm.text.tekken import FIRST_TOKENS, VERSIONS  # noqa: E402
from flambeau.llm.text.tokenizer import load_tokenizer  # noqa: E402

WORDS = r"[^\r\n\p{L}\p{N}]?\p{Lu}*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?\p{Lu}+"
PATTERN = WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PIECES = [
    "th",
    "he",
    "in",
    "er",
    "an",
    "the",
    "ing",
    "to",
    "be",
    "question",
    "qu",
    "est",
    "",
    "t",
    "",
    "th",
    "",
    "the",
    "aa",
    "aaa",
    "aaaa",
    "é",
    "мир",
    "你好",
    "==",
    "====",
]
NUM_SPECIAL = 40
ARGS = ["[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]


def grown_ranks() -> list[bytes]:
    """All bytes, then pieces, each of which two earlier tokens make."""
    ranks = [bytes([byte]) for byte in range(256)]
    for piece in (piece.replace("\0", " ").encode() for piece in PIECES):
        for size in range(2, len(piece) + 1):
            if piece[:size] not in ranks:
                ranks.append(piece[:size])
    return ranks


RANKS = grown_ranks()


def merged(piece: bytes) -> list[int]:
    """tiktoken's algorithm: of all neighbours that are a token together, the first ones of the lowest rank."""
    known = {token: rank for rank, token in enumerate(RANKS)}
    if piece in known:
        return [known[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [(known[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in known]
        if not pairs:
            return [known[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def tekken_folder(folder, version="v13", names=(), **config):
    """A folder with a tekken.json; without `names` the file leaves its special tokens out."""
    words = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(RANKS)]
    document = {"vocab": [*words, {"rank": len(words), "token_bytes": "//8="}]}  # beyond the vocabulary's size
    sizes = {"default_vocab_size": len(words) + NUM_SPECIAL, "default_num_special_tokens": NUM_SPECIAL}
    document["config"] = {"pattern": PATTERN, "version": version, **sizes, **config}
    if names:
        document["special_tokens"] = [{"rank": i, "token_str": name} for i, name in enumerate(names)]
    folder.mkdir(exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(document))
    return folder


def test_ids_are_those_of_ranks_and_the_pattern(tmp_path):
    tokenizer = load_tokenizer(tekken_folder(tmp_path, "v3"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (len(RANKS) + NUM_SPECIAL, 1, 2)
    chosen = random.Random(0)
    words = [
        *PIECES,
        "questioning",
        "THE",
        "12",
        "aaaaaaa",
        "=======",
        "\n",
        "  ",
        "naïve",
        "😀",
        "</s>",
        "你好好",
        "!",
    ]
    for _ in range(300):
        text = chosen.choice(["", " "]).join(chosen.choice(words) for _ in range(chosen.randint(1, 9)))
        ids = [i + NUM_SPECIAL for piece in regex.findall(PATTERN, text) for i in merged(piece.encode())]
        messages = [{"role": "user", "content": text}]
        assert tokenizer.encode_chat(messages) == [1, 3, *ids, 4]  # names of special tokens are text
        assert tokenizer.decode([1, *ids, 2]) == text
    assert tokenizer.encode("be</s>") == [1, *tokenizer.encode("be", add_special=False), 2]


TOOLS = [{"type": "function", "function": {"name": "time", "description": "é", "parameters": {"type": "object"}}}]
SHOWN = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "time", "description": "é", "parameters": {"type": '
)
SHOWN += '"object"}}}][/AVAILABLE_TOOLS]'
CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "123456789", "type": "function", "function": {"name": "time", "arguments": {"x": [1, True]}}},
            {"id": "abcdefghi", "type": "function", "function": {"name": "time", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "123456789", "content": '{"t": 3}'},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": 'it is "noon"'},
    {"role": "assistant", "content": "b "},
    {"role": "user", "content": "c"},
]
CALL_LIST = (
    '[TOOL_CALLS][{"name": "time", "arguments": {"x": [1, true]}, "id": "123456789"}, {"name": "time", "arguments": '
)
CALL_LIST += '{}, "id": "abcdefghi"}]</s>'
RESULTS_WITH_IDS = '[TOOL_RESULTS]123456789[TOOL_CONTENT]{"t": 3}[/TOOL_RESULTS]'
RESULTS_WITH_IDS += '[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]it is "noon"[/TOOL_RESULTS]'
WRITTEN = {  # what mistral-common 1.13 writes for this chat
    "v3": "[INST]a[/INST]" + CALL_LIST + '[TOOL_RESULTS]{"content": {"t": 3}, "call_id": "123456789"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS]{"content": "it is \\"noon\\"", "call_id": "abcdefghi"}[/TOOL_RESULTS]b</s>'
    f"{SHOWN}[INST]S\n\nc[/INST]",
    "v7": f"[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]a[/INST]{CALL_LIST}{RESULTS_WITH_IDS}b</s>{SHOWN}[INST]c[/INST]",
    "v11": '[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]a[/INST][TOOL_CALLS]time[CALL_ID]123456789[ARGS]{"x": [1, true]}'
    f"[TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{{}}</s>{RESULTS_WITH_IDS}b</s>{SHOWN}[INST]c[/INST]",
    "v13": f"[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]{SHOWN}[INST]a[/INST]"
    '[TOOL_CALLS]time[ARGS]{"x": [1, true]}[TOOL_CALLS]time[ARGS]{}</s>[TOOL_RESULTS]{"t": 3}[/TOOL_RESULTS]'
    '[TOOL_RESULTS]it is "noon"[/TOOL_RESULTS]b</s>[INST]c[/INST]',
}
FORMATS = {
    "v3": ("mistral", False),
    "v7": ("mistral", False),
    "v11": ("mistral_args", True),
    "v13": ("mistral_args", True),
}


@pytest.mark.parametrize("version", sorted(WRITTEN))
def test_chats_have_the_form_of_their_version(tmp_path, version):
    assert WRITTEN.keys() == VERSIONS.keys()
    names = () if version == "v3" else (*FIRST_TOKENS, *(ARGS if version in ("v11", "v13") else ()))
    tokenizer = load_tokenizer(tekken_folder(tmp_path, version, names))
    assert tokenizer.render_chat(CHAT, tools=TOOLS) == "<s>" + WRITTEN[version]
    ids = tokenizer.encode_chat(CHAT, tools=TOOLS)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "<s>" + WRITTEN[version]
    chat_format = ChatFormat.of(tokenizer)
    assert (chat_format.tools.name, chat_format.thinks) == FORMATS[version]
    if chat_format.thinks:
        thought = [CHAT[1], {"role": "assistant", "content": "b", "reasoning_content": "t"}, CHAT[-1]]
        assert "[THINK]t[/THINK]b</s>" in tokenizer.render_chat(thought)


def test_what_a_file_lacks_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"version of the chat format.*known are v3, v7, v11, v13.*chat_template"):
        load_tokenizer(tekken_folder(tmp_path, "v99"))
    (tmp_path / "chat_template.jinja").write_text("[INST]{{ messages[0].content }}")
    assert load_tokenizer(tmp_path).render_chat([{"role": "user", "content": "a"}]) == "[INST]a"
    for name, reason in (("the", "also text: the"), ("<s>", r"not a tekken.json \(KeyError\('<s>'")):
        names = ["the"] if name == "the" else ["<unk>"]
        with pytest.raises(TokenizerError, match=reason):
            load_tokenizer(tekken_folder(tmp_path, "v13", names))


def test_the_file_of_kimi_is_read_by_the_class_that_it_names(tmp_path):
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(RANKS)]
    (tmp_path / "tiktoken.model").write_text("".join(lines))
    first = len(RANKS)
    tokens = {first: ("[BOS]", True), first + 1: ("[EOS]", True), first + 5: ("<|tool_call_begin|>", False)}
    described = {str(i): {"content": name, "special": special} for i, (name, special) in tokens.items()}
    settings = {"bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": described}
    settings |= {"chat_template": "{{ messages[0].content }}[EOS]", "tokenizer_class": "TikTokenTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (first + 256, first, first + 1)
    text = "the question aaaaa 你好 ==="
    pieces = ["the", " question", " aaaaa", " ", "你好", " ==="]  # Han apart from the rest
    ids = [i for piece in pieces for i in merged(piece.encode())]
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode_chat([{"role": "user", "content": f"{text}[EOS]"}])[-1] == first + 1
    assert tokenizer.encode("<|tool_call_begin|>") == [first + 5]
    assert tokenizer.decode([*ids, first + 1]) == text
    (tmp_path / "tiktoken.model").write_text("".join(reversed(lines)))
    with pytest.raises(TokenizerError, match="its ranks are not 0, 1, 2"):
        load_tokenizer(tmp_path)
