"""RequestRules: what requests say of single tokens, for the tokens of one vocabulary."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence

from flambeau.llm.core.sequence import TokenGrammar
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.grammar.token_rules import RULES, BadSequences, PromptNgrams, TokenRules, bits_of, has_rules
from flambeau.llm.sampling.dry_penalty import has_dry_penalty
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.text.tokenizer import Tokenizer

NewGrammar = Callable[[], TokenGrammar]
MAX_NEW_WORDS = 20  # bad words that may be tokenized between two steps
MAX_KNOWN = 64  # lists of bad words


class RequestRules:
    """Makes the rules of requests."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Collection[int] = ()) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = [token for token in eos_ids if token < vocab_size]
        self._known_words: OrderedDict[tuple[str, ...], BadSequences] = OrderedDict()

    def around(
        self, grammar: NewGrammar | None, prompt_ids: Sequence[int], params: SamplingParams
    ) -> NewGrammar | None:
        """The grammar of a text within the rules for its tokens."""
        may_end_early = grammar is not None and params.min_tokens and params.stop_token_ids
        if not has_rules(params) and not may_end_early:
            return grammar
        bad = self._bad_words(params.bad_words)
        allowed = bits_of(params.allowed_token_ids, bad, self._vocab_size)
        ngrams = PromptNgrams(params.no_repeat_ngram_size, prompt_ids) if params.no_repeat_ngram_size else None
        return lambda: TokenRules(
            allowed=allowed,
            bad=bad,
            ngrams=ngrams,
            names=[name for name in RULES if getattr(params, name)],
            inner=grammar() if grammar is not None else None,
            end_ids=[*self._eos_ids, *params.stop_token_ids],
            min_tokens=params.min_tokens,
        )

    def is_ready(self, params: SamplingParams) -> bool:
        """Whether `around` and `breakers` are quick."""
        if len(params.bad_words) > MAX_NEW_WORDS and tuple(params.bad_words) not in self._known_words:
            return False
        if not has_dry_penalty(params) or self._tokenizer is None:
            return True
        return all(map(self._tokenizer.knows_tokens_with, params.dry_sequence_breakers))

    def prepare(self, params: SamplingParams) -> None:
        """Make them quick; for another thread, beside the steps."""
        self._bad_words(params.bad_words)
        self.breakers(params)

    def _bad_words(self, words: Sequence[str]) -> BadSequences:
        key = tuple(words)
        found = self._known_words.get(key)
        if found is None:
            found = BadSequences(ids for ids in self._bad_sequences(words) if ids)
            while len(self._known_words) >= MAX_KNOWN:
                self._known_words.popitem(last=False)
            self._known_words[key] = found
        return found

    def _bad_sequences(self, words: Sequence[str]) -> Iterator[list[int]]:
        """The tokens of each text as it is, behind a space as within a sentence, and where a line begins."""
        if not words:
            return
        if self._tokenizer is None:
            raise InvalidRequest("bad_words need a tokenizer, which this engine has not; leave them out", "bad_words")
        line_break, *whole = (self._tokenizer.encode(text, add_special=False) for text in ("\n", *words))
        for word, ids in zip(words, whole, strict=True):
            yield ids
            if not word[0].isspace():
                yield self._tokenizer.encode(f" {word}", add_special=False)
                behind = self._tokenizer.encode(f"\n{word}", add_special=False)
                if behind[: len(line_break)] == line_break:
                    yield behind[len(line_break) :]

    def breakers(self, params: SamplingParams) -> frozenset[int] | None:
        """The tokens at which a repetition ends; None: repetitions are not penalized."""
        if not has_dry_penalty(params):
            return None
        texts = params.dry_sequence_breakers
        if texts and self._tokenizer is None:
            raise InvalidRequest(
                "dry_sequence_breakers need a tokenizer, which this engine has not; send an empty list",
                "dry_sequence_breakers",
            )
        return frozenset().union(*(self._tokenizer.tokens_with(text) for text in texts if self._tokenizer))
