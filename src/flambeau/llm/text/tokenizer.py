"""Tokenizer: text ↔ ids, and conversations → prompts, from a model's own files."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flambeau.llm.errors import InvalidRequest, TokenizerError
from flambeau.llm.gguf_header import GgufHeader, gguf_path, read_header
from flambeau.llm.text.chat_template import (
    ChatTemplate,
    Message,
    plain_text,
    read_messages,
    up_to_end_mark,
    with_end_mark,
)
from flambeau.llm.text.detokenizer import (
    ByteDecoder,
    CharacterDecoder,
    Detokenizer,
    MarkerDecoder,
    WindowDecoder,
    strip_leading,
)
from flambeau.llm.text.gguf_vocabulary import gguf_vocabulary
from flambeau.llm.text.gguf_vocabulary import named_tokens as gguf_names
from flambeau.llm.text.infill import find_infill
from flambeau.llm.text.tekken import NAMES, VERSIONS, read_tekken
from flambeau.llm.text.tiktoken_file import read_tiktoken
from flambeau.llm.text.tokenizer_files import (
    TEKKEN,
    TIKTOKEN,
    Strips,
    added_tokens,
    declared_tokens,
    end_ids,
    find_file,
    named_tokens,
    older_names,
    read_json,
    read_templates,
)
from flambeau.llm.text.vocabulary import (
    SentencePieceVocabulary,
    TokenizersVocabulary,
    Vocabulary,
    open_sentencepiece,
    open_tokenizers,
)

logger = logging.getLogger(__name__)

MAX_KEPT_TEXTS = 256  # whose tokens are known
SPACES = ("\u2581", "\u0120")  # how SentencePiece and byte-level vocabularies write a space
MASK = "\ufdd0"  # a noncharacter: breaks up the names of special tokens in user text


class Tokenizer:
    """Text to ids and back.

    Special tokens ("<s>", "<|im_end|>") come from text in two places only: a plain prompt for a model with a
    `tokenizer.json` (people write such prompts by hand), and the model's own chat template. The messages of a
    conversation are always plain text. Special tokens are not part of decoded text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        tokens: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        templates: Mapping[str, str] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._special = frozenset(vocabulary.special_ids.values())
        names = sorted(filter(None, vocabulary.named_ids), key=len, reverse=True)
        self._name_pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._part_pattern = re.compile("|".join(with_spaces(name, vocabulary.strips) for name in names) or "(?!)")
        self._visible: dict[int, bytes] = {}
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._with_text: OrderedDict[str, frozenset[int]] = OrderedDict()
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.unk_id, self.pad_id = vocabulary.unk_id, vocabulary.pad_id
        own = () if vocabulary.eos_id is None else (vocabulary.eos_id,)
        self.eos_ids = frozenset((*eos_ids, *own))
        self.template = ChatTemplate(templates, tokens or {}) if templates else None
        self.before_chats = ""  # a text that the template does not write
        self.begins_chats = False  # chats whose template does not write what begins every sequence get it
        self.infill = find_infill(vocabulary)  # None: the model writes behind a prompt only

    @property
    def vocab_size(self) -> int:
        """The number of ids; a network may have a few more, which are not text."""
        return self._vocabulary.size

    @property
    def num_base_tokens(self) -> int:
        """The number of ids without tokens that were added to the vocabulary."""
        return self._vocabulary.num_base

    @property
    def has_bytes(self) -> bool:
        """Whether each token has bytes of its own, which follow each other in a text."""
        return self._vocabulary.has_bytes

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a prompt, by default with the tokens that begin every sequence (such as Llama's BOS)."""
        return self._vocabulary.encode(text, add_special=add_special)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence."""
        if not self._vocabulary.has_bytes:
            return self._vocabulary.decode(token_ids)
        text = b"".join(map(self.visible_bytes, token_ids))
        return strip_leading(text, self._vocabulary.leading_spaces).decode("utf-8", self._vocabulary.byte_errors)

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        marker_texts: Mapping[int, str] | None = None,
    ) -> Detokenizer:
        """Turns the tokens after a prompt into text, up to a stop string.

        `marker_texts` are texts for special tokens; others have none, or without `skip_special` their names.
        """
        special_ids = self._vocabulary.special_ids
        stop_names = {special_ids[text]: text for text in stop if text in special_ids}
        decoder = self._character_decoder(prompt_ids)
        if not skip_special:
            marker_texts = {**{token: text for text, token in special_ids.items()}, **(marker_texts or {})}
        if marker_texts:
            decoder = MarkerDecoder(decoder, marker_texts)
        return Detokenizer(decoder, stop=stop, stop_names=stop_names, include_stop=include_stop)

    def _character_decoder(self, prompt_ids: Sequence[int]) -> CharacterDecoder:
        if not self._vocabulary.has_bytes:
            return WindowDecoder(self._vocabulary.decode, prompt_ids)
        vocabulary = self._vocabulary
        return ByteDecoder(self.visible_bytes, vocabulary.leading_spaces, prompt_ids, vocabulary.byte_errors)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a character; for a special token, its name."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._vocabulary.token_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """One token in readable form."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return text

    def visible_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for a special token."""
        piece = self._visible.get(token_id)
        if piece is None:
            piece = b"" if token_id in self._special else self.token_bytes(token_id)
            self._visible[token_id] = piece
        return piece

    def tokens_with(self, text: str) -> frozenset[int]:
        """The tokens that contain a text; if none does, the last token of the text itself. Slow for a new text."""
        found = self._with_text.get(text)
        if found is None:
            wanted = text.encode()
            found = frozenset(i for i in range(self.vocab_size) if wanted in self._vocabulary.token_bytes(i))
            found = found or frozenset(self.encode(text, add_special=False)[-1:])
            while len(self._with_text) >= MAX_KEPT_TEXTS:
                self._with_text.popitem(last=False)
            self._with_text[text] = found
        return found

    def knows_tokens_with(self, text: str) -> bool:
        """Whether `tokens_with` is quick."""
        return text in self._with_text

    def piece(self, token_id: int) -> str:
        """A token as the vocabulary's file spells it. Raises IndexError for an unknown id."""
        return self._vocabulary.piece(token_id)

    def piece_id(self, piece: str) -> int | None:
        return self._vocabulary.piece_id(piece)

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Special tokens by their names."""
        return self._vocabulary.special_ids

    def named_id(self, text: str) -> int | None:
        """The token of a name that messages cannot contain; special tokens are among them."""
        return self._vocabulary.named_ids.get(text)

    def special_id(self, text: str) -> int | None:
        return self._vocabulary.special_ids.get(text)

    @property
    def template_text(self) -> str:
        """The source of the chat template; empty if there is none."""
        return self.template.text if self.template is not None else ""

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template includes tools."""
        return self.template is not None and self.template.shows_tools

    def render_chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """The prompt text of a conversation; `options` are variables of the template."""
        if self.template is None:
            return plain_text(messages)
        options.setdefault("add_generation_prompt", True)
        return self.template.render(read_messages(messages), tools=tools, **options)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        expansions: Mapping[str, Sequence[str]] = MappingProxyType({}),
        **options: Any,
    ) -> list[int]:
        """The prompt ids of a conversation. Messages cannot contain special tokens.

        With `continue_final_message` the prompt ends with the text of the last message, and the model continues it.
        `expansions` are names that the template writes, and the texts that replace them one after another.
        """
        if self.template is None:
            return self._vocabulary.encode(plain_text(messages), add_special=True)
        masked, others = self._mask(messages, (*expansions,)), self._mask(options)
        if continue_final_message:
            masked, others = with_end_mark(masked), {**others, "add_generation_prompt": False}
        text = self.render_chat(masked, tools=self._mask(tools), **others)
        if continue_final_message:
            text = up_to_end_mark(text)
        for name, texts in expansions.items():
            text = expanded(text, name, texts)  # those in messages are masked
        begin, text = self._beginning(text), self.before_chats + text
        if self._vocabulary.finds_special and MASK not in text:
            return begin + self._vocabulary.encode(text, add_special=False)
        return begin + self._encode_parts(text)

    def _beginning(self, text: str) -> list[int]:
        """What begins every sequence, where a chat does not begin with it."""
        if not self.begins_chats or self.bos_id is None or text.startswith(self.token_text(self.bos_id)):
            return []
        plain, whole = (self._vocabulary.encode("a", add_special=one) for one in (False, True))
        return whole[: whole.index(plain[0])] if plain and plain[0] in whole else []

    def encode_with_special(self, text: str) -> list[int]:
        """The ids of a text in which names of special tokens are these tokens, with nothing added."""
        return self._encode_parts(text)

    def _mask(self, value: Any, others: tuple[str, ...] = ()) -> Any:
        """A copy in which the names of special tokens are broken up, and `others`."""
        if isinstance(value, str):
            masked = self._name_pattern.sub(lambda found: found[0][0] + MASK + found[0][1:], value)
            return reduce(lambda text, name: text.replace(name, name[0] + MASK + name[1:]), others, masked)
        if isinstance(value, Mapping):
            return {self._mask(key, others): self._mask(item, others) for key, item in value.items()}
        return [self._mask(item, others) for item in value] if isinstance(value, list | tuple) else value

    def _encode_parts(self, text: str) -> list[int]:
        """Ids of a rendered conversation: special tokens for whole names, text between them."""
        ids: list[int] = []
        at = 0
        named_ids = self._vocabulary.named_ids
        for found in self._part_pattern.finditer(text):
            ids += self._encode_text(text[at : found.start()])
            ids.append(named_ids[found[0] if found[0] in named_ids else found[0].strip()])
            at = found.end()
        return ids + self._encode_text(text[at:])

    def _encode_text(self, text: str) -> list[int]:
        return self._vocabulary.encode_plain(text.replace(MASK, "")) if text else []


def expanded(text: str, name: str, texts: Sequence[str]) -> str:
    """The text with `texts` in the places of a name; raises InvalidRequest unless there are as many of both."""
    first, *others = text.split(name)
    if len(others) != len(texts):
        raise InvalidRequest(
            f"the model's chat template shows {len(others)} of the {len(texts)} files in the messages that {name} "
            "stands for",
            "messages",
        )
    return first + "".join(part for pair in zip(texts, others, strict=True) for part in pair)


def with_spaces(name: str, strips: Mapping[str, Strips]) -> str:
    """The pattern of a token's name with the spaces that it takes."""
    own = strips.get(name, Strips())
    return (r"\s*" if own.left else "") + re.escape(name) + (r"\s*" if own.right else "")


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a model's folder, of a `tokenizer.json`, of a SentencePiece `.model`, or of a GGUF file."""
    gguf = gguf_path(Path(path))
    if gguf is not None:
        return gguf_tokenizer(read_header(gguf))
    file = find_file(Path(path))
    folder = file.parent
    settings = read_json(folder / "tokenizer_config.json")
    settings |= older_names(folder, settings)
    tokens = named_tokens(settings)
    vocabulary: Vocabulary
    if file.name == TEKKEN:
        return tekken_tokenizer(file, settings)
    if file.name == TIKTOKEN:
        vocabulary = read_tiktoken(file, settings)
    elif file.suffix == ".json":
        vocabulary = TokenizersVocabulary(open_tokenizers(file), tokens, declared_tokens(folder, settings))
    else:
        vocabulary = SentencePieceVocabulary(
            open_sentencepiece(file.read_bytes(), str(file)),
            added_tokens(folder, settings),
            add_bos=settings.get("add_bos_token") is not False,
        )
        names = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
        tokens = {name: vocabulary.token_bytes(i).decode() for name, i in names.items() if i is not None} | tokens
    if unheeded := unheeded_settings(settings, vocabulary):
        logger.warning(
            "tokenizer_config.json in %s has %s, which %s contradicts; that file is followed, as transformers 5 does",
            folder,
            ", ".join(unheeded),
            file.name,
        )
    return Tokenizer(vocabulary, tokens=tokens, eos_ids=end_ids(folder), templates=read_templates(folder, settings))


def tekken_tokenizer(file: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a folder that has Mistral's file alone; a chat template beside it comes first."""
    vocabulary, own = read_tekken(file)
    templates = read_templates(file.parent, settings) or own
    if not templates:
        raise TokenizerError(
            f"{file} has a version of the chat format that is not known (known are {', '.join(VERSIONS)}); put the "
            "model's chat_template.jinja beside it"
        )
    return Tokenizer(vocabulary, tokens=NAMES, eos_ids=end_ids(file.parent), templates=templates)


def unheeded_settings(settings: Mapping[str, Any], vocabulary: Vocabulary) -> list[str]:
    """What tokenizer_config.json says of prompts, and the vocabulary's own file does not do."""
    bare, whole = (vocabulary.encode("a", add_special=is_added) for is_added in (False, True))
    if not bare:
        return []
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    is_done = {
        "add_bos_token": start > 0,
        "add_eos_token": start + len(bare) < len(whole),
        "add_prefix_space": vocabulary.piece(bare[0]).startswith(SPACES),
    }
    if vocabulary.finds_special:
        is_done["split_special_tokens"] = False
    given = {key: settings.get(key) for key in is_done}
    return [
        f"{key}: {str(value).lower()}"
        for key, value in given.items()
        if isinstance(value, bool) and value is not is_done[key]
    ]


def gguf_tokenizer(header: GgufHeader) -> Tokenizer:
    """The tokenizer and the chat templates of a GGUF file."""
    start = "tokenizer.chat_template"
    templates = {
        key.removeprefix(start).removeprefix(".") or "default": source
        for key, source in header.values.items()
        if key.startswith(start) and isinstance(source, str)
    }
    vocabulary = gguf_vocabulary(header)
    return Tokenizer(vocabulary, tokens=gguf_names(header), eos_ids=header.end_ids, templates=templates)
