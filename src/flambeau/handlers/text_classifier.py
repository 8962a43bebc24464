"""TextClassifier: for models that take word indices and the offset of each text."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.attribution import attribute_to_words, layer_integrated_gradients, with_gradients
from flambeau.handlers.base import BaseHandler
from flambeau.handlers.labels import map_class_to_label
from flambeau.handlers.options import handler_options, read_count, read_weights_only
from flambeau.handlers.profiler import timed
from flambeau.handlers.request_rows import content_of, target_of
from flambeau.handlers.text_normalization import (
    expand_contractions,
    remove_accents,
    remove_html_tags,
    remove_punctuation,
)

if TYPE_CHECKING:
    from flambeau.worker.context import Context

VOCABULARY_FILE = "source_vocab.pt"
UNKNOWN = "<unk>"
PADDING = "<pad>"


class TextBatch(NamedTuple):
    """The word indices of all texts in one vector, the start of each text in it, and the words."""

    indices: torch.Tensor
    offsets: torch.Tensor
    words: list[list[str]]


class TextHandler(BaseHandler, abc.ABC):
    """Loads the model and its vocabulary, and normalizes texts."""

    abilities = ("text",)  # the form of the console

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None
        self.tokenizer = get_tokenizer("basic_english")

    def initialize(self, context: Context) -> None:
        super().initialize(context)
        options = {**context.model_yaml_config, **handler_options(context.model_yaml_config)}
        path = Path(self.get_source_vocab_path(context))
        self.source_vocab = load_vocabulary(path, weights_only=read_weights_only(options))

    @cached_property
    def lig(self) -> Any:
        """Captum's LayerIntegratedGradients of the embedding."""
        return layer_integrated_gradients(self.model, self.model.embedding)

    def get_source_vocab_path(self, ctx: Context) -> str:
        """The path of the vocabulary: the manifest's `sourceVocab`, else source_vocab.pt."""
        name = ((ctx.manifest or {}).get("model") or {}).get("sourceVocab") or VOCABULARY_FILE
        path = Path(ctx.system_properties["model_dir"], name)
        if not path.is_file():
            raise HandlerError(f"Missing the source_vocab file: add {name} to the archive with --extra-files")
        return str(path)

    def _remove_html_tags(self, text: str) -> str:
        return remove_html_tags(text)

    def _expand_contractions(self, text: str) -> str:
        return expand_contractions(text)

    def _remove_accented_characters(self, text: str) -> str:
        return remove_accents(text)

    def _remove_punctuation(self, text: str) -> str:
        return remove_punctuation(text)

    def _remove_puncutation(self, text: str) -> str:  # existing handlers call it by this misspelled name
        return self._remove_punctuation(text)

    def _tokenize(self, text: str) -> list[str]:
        return list(self.tokenizer(text))

    def get_word_token(self, input_tokens: Sequence[str]) -> list[str]:
        """Tokens without the Ġ that byte-pair tokenizers put before a word."""
        return [token.replace("Ġ", "") for token in input_tokens]

    def summarize_attributions(self, attributions: torch.Tensor) -> torch.Tensor:
        """One number per token: the sum of its vector; all numbers are scaled to length one."""
        sums = attributions.sum(dim=-1).squeeze(0)
        length: torch.Tensor = torch.linalg.vector_norm(sums).clamp_min(torch.finfo(sums.dtype).tiny)
        return sums / length


class TextClassifier(TextHandler):
    """Returns the probability of each class; `handler: ngrams` is the longest n-gram that is looked up."""

    handler_keys = ("ngrams", "weights_only")
    ngrams = 2
    names_classes = True

    def initialize(self, context: Context) -> None:
        super().initialize(context)
        self.ngrams = read_count(handler_options(context.model_yaml_config), "ngrams", self.ngrams)

    @timed
    def preprocess(self, data: Sequence[Any]) -> TextBatch:
        """Requests → the word indices of all texts and the start of each."""
        indices: list[int] = []
        offsets, words = [], []
        for row in data:
            known = self.look_up(self.clean(text_of(content_of(row))))
            offsets.append(len(indices))
            words.append([word for word, _ in known])
            indices.extend(index for _, index in known)
        return TextBatch(self._to_tensor(indices), self._to_tensor(offsets), words)

    def clean(self, text: str) -> str:
        """Normalize a text to lower-case ASCII words."""
        text = self._expand_contractions(self._remove_html_tags(text).lower())
        return self._remove_punctuation(self._remove_accented_characters(text))

    def look_up(self, text: str) -> list[tuple[str, int]]:
        """The words and n-grams of a text that are in the vocabulary, with their indices."""
        words = ngrams_iterator(self._tokenize(text), self.ngrams)
        known = [(word, index) for word in words if (index := index_of(self.source_vocab, word)) is not None]
        if not known:
            raise BadRequest("the text has no word of the model's vocabulary")
        return known

    def _to_tensor(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the model with indices and offsets; a plain pair holds the indices of one text first."""
        indices, offsets = data[0], data[1] if isinstance(data, TextBatch) else self._to_tensor([0])
        return super().inference(indices, offsets, *args, **kwargs)

    @timed
    def postprocess(self, data: torch.Tensor) -> list[Any]:
        """Scores → one dict of label → probability per text."""
        return map_class_to_label(torch.nn.functional.softmax(data, dim=1).tolist(), self.mapping)

    def get_insights(self, text_preprocess: TextBatch, _: Any, target: Any = 0) -> list[Any]:
        """Attribution of each word to the score of class `target`, by integrated gradients at the embedding."""
        number = target_of(target)
        attributions: torch.Tensor = with_gradients(lambda: self._attribute(text_preprocess.indices, number), number)
        importances = self.summarize_attributions(attributions.detach())
        return [{"importances": importances.tolist(), "words": self.get_word_token(text_preprocess.words[0])}]

    def _attribute(self, indices: torch.Tensor, target: int) -> torch.Tensor:
        layer = getattr(self.model, "embedding", None)
        if layer is None or isinstance(self.model, torch.jit.ScriptModule):
            raise BadRequest("explanations of text need an eager model with a layer `embedding`")
        reference = torch.full_like(indices, reference_index(self.source_vocab))
        if isinstance(layer, torch.nn.EmbeddingBag):
            return attribute_to_words(self.model, layer, indices, reference, target)
        result: torch.Tensor = self.lig.attribute(
            indices, reference, additional_forward_args=self._to_tensor([0]), target=target
        )
        return result


def text_of(value: Any) -> str:
    """A request's value as text; bytes are UTF-8."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (bytes, bytearray, memoryview)):
        kind = "an object" if isinstance(value, dict) else type(value).__name__
        raise BadRequest(f"send a text as plain text or as a JSON string, not as {kind}")
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the text is not UTF-8: {error}") from None


# These marks become words of their own, the others separate words.
_MARKS = str.maketrans({**{mark: f" {mark} " for mark in "'.,()!?"}, ";": " ", ":": " "})


# ---- words; the names and results are those of torchtext ----


def basic_english(text: str) -> list[str]:
    """Lower-case words; punctuation marks are words, double quotes are dropped."""
    return text.lower().replace('"', "").replace("<br />", " ").translate(_MARKS).split()


def get_tokenizer(tokenizer: str | Callable[[str], Any] | None, language: str = "en") -> Callable[[str], Any]:
    """A tokenizer by name; None splits at white space, and a function is returned unchanged."""
    if tokenizer is None:
        return str.split
    if callable(tokenizer):
        return tokenizer
    if tokenizer != "basic_english":
        raise ValueError(f"there is no tokenizer {tokenizer!r}; give basic_english, or a function")
    if language != "en":
        raise ValueError(f"basic_english is for language 'en', not {language!r}")
    return basic_english


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """The words, then pairs of neighbors, and so on up to `ngrams` words joined by a space."""
    for size in range(1, ngrams + 1):
        for start in range(len(token_list) - size + 1):
            yield " ".join(token_list[start : start + size])


# ---- indices ----


def load_vocabulary(path: Path, *, weights_only: bool = True) -> Any:
    """A dict of token → index; with `weights_only=False` also any object that was pickled."""
    import torch

    try:
        vocabulary = torch.load(path, map_location="cpu", weights_only=weights_only)
    except Exception as error:
        remedy = (
            "save a dict of token → index with torch.save, or, if you trust the file, "
            "set weights_only: false in model-config.yaml"
        )
        raise HandlerError(f"the vocabulary {path.name} cannot be loaded: {error}; {remedy}") from error
    if isinstance(vocabulary, (list, tuple)):
        return {token: index for index, token in enumerate(vocabulary)}
    if isinstance(vocabulary, Mapping) or not weights_only:
        return vocabulary
    raise HandlerError(
        f"the vocabulary {path.name} holds {type(vocabulary).__name__}, not a dict of token → index or a list of tokens"
    )


def index_of(vocabulary: Any, token: str) -> int | None:
    """The index of a token, else that of `<unk>`; None if the vocabulary has neither."""
    found = look_up(vocabulary, token)
    return found if found is not None else look_up(vocabulary, UNKNOWN)


def reference_index(vocabulary: Any) -> int:
    """The index of a token without meaning: padding, else the unknown token, else the first."""
    found = look_up(vocabulary, PADDING)
    return found if found is not None else index_of(vocabulary, UNKNOWN) or 0


def look_up(vocabulary: Any, token: str) -> int | None:
    """The index of a token in a mapping, or in an object with `__getitem__` or `lookup`."""
    if isinstance(vocabulary, Mapping):
        found = vocabulary.get(token)
    else:
        # A user's own class: there is no common protocol.
        get = vocabulary.__getitem__ if hasattr(vocabulary, "__getitem__") else vocabulary.lookup
        try:
            found = get(token)
        except (LookupError, RuntimeError):  # torchtext's compiled vocabulary raises RuntimeError
            return None
    return None if found is None else int(found)
