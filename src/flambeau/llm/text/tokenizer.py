"""Tokenizer: text ↔ ids, and conversations → prompts, from a model's own files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau.llm.text.characters import ByteCharacters, Characters, WindowCharacters, strip_leading
from flambeau.llm.text.chat_messages import Message, plain_text, read_messages
from flambeau.llm.text.chat_template import ChatTemplate
from flambeau.llm.text.sentencepiece_vocabulary import SentencePieceVocabulary
from flambeau.llm.text.tokenizer_files import added_tokens, end_ids, find_file, named_tokens, read_json, read_templates
from flambeau.llm.text.tokenizers_vocabulary import TokenizersVocabulary
from flambeau.llm.text.vocabulary import Vocabulary

MASK = "\ufdd0"  # no character: breaks the name of a special token in what a user wrote


class Tokenizer:
    """Text to ids and back.

    Special tokens ("<s>", "<|im_end|>") come from text in two places only: a plain prompt for a model that has a
    `tokenizer.json` (people write such prompts by hand), and the model's own chat template. What a conversation's
    messages say is always text, whatever it spells. Special tokens are no part of decoded text.
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
        self._visible: dict[int, bytes] = {}
        self.bos_id = vocabulary.bos_id
        own = () if vocabulary.eos_id is None else (vocabulary.eos_id,)
        self.eos_ids = frozenset((*eos_ids, *own))
        self.template = ChatTemplate(templates, tokens or {}) if templates else None

    @property
    def vocab_size(self) -> int:
        """How many ids there are; a network may have a few more, which are no text."""
        return self._vocabulary.size

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how conversations are written; else they are joined as plain text."""
        return self.template is not None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a prompt, with what begins every sequence (the BOS of Llama) unless told otherwise."""
        return self._vocabulary.encode(text, add_special=add_special)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence."""
        if not self._vocabulary.has_bytes:
            return self._vocabulary.decode(token_ids)
        text = b"".join(map(self.visible_bytes, token_ids))
        return strip_leading(text, self._vocabulary.leading_spaces).decode("utf-8", "replace")

    def characters(self, prompt_ids: Sequence[int]) -> Characters:
        """A decoder for the tokens that follow a prompt, one by one."""
        if not self._vocabulary.has_bytes:
            return WindowCharacters(self._vocabulary.decode, prompt_ids)
        return ByteCharacters(self.visible_bytes, self._vocabulary.leading_spaces, prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, perhaps only a part of a character; a special token has its name's."""
        return self._vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """One token, for people to read."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def visible_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text: none for a special one."""
        piece = self._visible.get(token_id)
        if piece is None:
            piece = b"" if token_id in self._special else self.token_bytes(token_id)
            self._visible[token_id] = piece
        return piece

    def special_id(self, text: str) -> int | None:
        """The special token of this name."""
        return self._vocabulary.special_ids.get(text)

    @property
    def shows_tools(self) -> bool:
        """Whether a chat's prompt tells the model of tools."""
        return self.template is not None and self.template.shows_tools

    def render_chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """A conversation as the text of a prompt; `options` are variables of the template."""
        if self.template is None:
            return plain_text(messages)
        options.setdefault("add_generation_prompt", True)
        return self.template.render(read_messages(messages), tools=tools, **options)

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> list[int]:
        """A conversation as the ids of a prompt. No message can speak in special tokens."""
        if self.template is None:
            return self._vocabulary.encode(plain_text(messages), add_special=True)
        text = self.render_chat(self._mask(messages), tools=self._mask(tools), **self._mask(options))
        if self._vocabulary.finds_special and MASK not in text:
            return self._vocabulary.encode(text, add_special=False)
        return self._encode_parts(text)

    def _mask(self, value: Any) -> Any:
        """A copy in which the name of no special token is whole."""
        if isinstance(value, str):
            return self._name_pattern.sub(lambda found: found[0][0] + MASK + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._mask(key): self._mask(item) for key, item in value.items()}
        return [self._mask(item) for item in value] if isinstance(value, list | tuple) else value

    def _encode_parts(self, text: str) -> list[int]:
        """Ids of a rendered conversation: special tokens where a name is whole, text between them."""
        ids: list[int] = []
        at = 0
        for found in self._name_pattern.finditer(text):
            ids += self._encode_text(text[at : found.start()])
            ids.append(self._vocabulary.named_ids[found[0]])
            at = found.end()
        return ids + self._encode_text(text[at:])

    def _encode_text(self, text: str) -> list[int]:
        return self._vocabulary.encode_plain(text.replace(MASK, "")) if text else []


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a model's folder, of a `tokenizer.json`, or of a SentencePiece `.model`."""
    file = find_file(Path(path))
    folder = file.parent
    settings = read_json(folder / "tokenizer_config.json")
    tokens = named_tokens(read_json(folder / "special_tokens_map.json")) | named_tokens(settings)
    vocabulary: Vocabulary
    if file.suffix == ".json":
        vocabulary = TokenizersVocabulary(file, tokens)
    else:
        vocabulary = SentencePieceVocabulary(
            file, added_tokens(folder, settings), add_bos=settings.get("add_bos_token") is not False
        )
        names = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
        tokens = {name: vocabulary.token_bytes(i).decode() for name, i in names.items() if i is not None} | tokens
    return Tokenizer(vocabulary, tokens=tokens, eos_ids=end_ids(folder), templates=read_templates(folder, settings))
