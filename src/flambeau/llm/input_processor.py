"""InputProcessor: validates requests and turns them into sequences."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace

import torch

from flambeau.llm.chat.chat_format import ChatTurn
from flambeau.llm.core.sequence import (
    EncodedMedia,
    IncrementalDetokenizer,
    NoDetokenizer,
    PromptMedia,
    Sequence,
    TokenGrammar,
)
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.grammar.compiler import Grammar, GrammarCompiler
from flambeau.llm.grammar.reasoning_budget import ReasoningBudget
from flambeau.llm.media_kinds import MediaKind
from flambeau.llm.models.sound_architecture import SoundArchitecture
from flambeau.llm.models.vision_architecture import ONE_IMAGE, PretrainedVision, VisionArchitecture
from flambeau.llm.request_rules import NewGrammar, RequestRules
from flambeau.llm.sampling.dry_penalty import DryPenalty
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.text.tokenizer import Tokenizer

SEED_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of a request's choices
FIRST_SEED = torch.initial_seed()  # random bits, unless the program has seeded PyTorch before this import


class InputProcessor:
    """Checks requests against the limits of the model."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_length: int,
        tokenizer: Tokenizer | None,
        eos_ids: Collection[int] = (),
        vision: VisionArchitecture | None = None,
        sounds: SoundArchitecture | None = None,
    ) -> None:
        self._vocab_size, self._max_length, self._tokenizer = vocab_size, max_length, tokenizer
        self._vision, self._sounds = vision, sounds
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_ids)
        self._rules = RequestRules(tokenizer, vocab_size, eos_ids)

    def to_sequences(
        self,
        request_id: str,
        prompt_ids: Many[int],
        params: SamplingParams,
        *,
        generated: Many[Many[int]] = (),
        seed: int | None = None,
        adapter: int = 0,
        turn: ChatTurn | None = None,
        media: Many[EncodedMedia] = (),
    ) -> list[Sequence]:
        """One sequence per choice; `generated` are tokens that the choices have already."""
        self._check_prompt(prompt_ids)
        placed = self._place_media(prompt_ids, media)
        self._check_token_ids(params)
        if seed is None:
            seed = new_seed() if params.seed is None else params.seed
            if params.seed is None and is_torch_seeded():
                params = replace(params, seed=seed)  # the text is to be repeated, also with speculation
        grammar = self._rules.around(self._grammar(params, turn), prompt_ids, params)
        breakers = self._rules.breakers(params)
        marker_texts = turn.format.marker_texts if turn is not None else {}
        choices = [
            self._to_sequence(
                request_id,
                i,
                prompt_ids,
                params,
                seed,
                generated[i] if i < len(generated) else (),
                grammar,
                None if breakers is None else DryPenalty(params, breakers),
                marker_texts,
            )
            for i in range(params.n)
        ]
        for sequence in choices:
            sequence.use_adapter(adapter)
            sequence.media = placed
        if not all(sequence.room > 0 for sequence in choices):
            raise InvalidRequest(
                f"the text so far leaves no room for another token: the context has {self._max_length}, the prompt "
                f"{len(prompt_ids)}; send a shorter prompt or ask for more tokens",
                "prompt",
            )
        return choices

    def _grammar(self, params: SamplingParams, turn: ChatTurn | None) -> NewGrammar | None:
        """Makes the grammar of each choice; None: the text is free."""
        structure = params.structured_outputs
        if turn is None:
            return matcher_of(self._grammars.compile(structure) if structure else None, params)
        new_reply = matcher_of(self._grammars.compile_reply(turn, structure), params)
        if turn.max_reasoning_tokens is None or not has_budget(turn):
            return new_reply
        is_channel = turn.format.tools.has_channels and structure is not None
        begin, end = turn.thought_texts(with_answer=not is_channel)
        new_answer = matcher_of(self._grammars.compile_reply(turn.without_thought(), structure), params)
        limit = turn.max_reasoning_tokens + len(self._encode_markers(begin))
        close_ids = self._encode_markers(end)

        def new_budget() -> TokenGrammar:
            return ReasoningBudget(
                limit=limit,
                close_ids=close_ids,
                is_thinking=lambda ids: turn.is_thinking(self._text_with_markers(ids)),
                vocab_size=self._vocab_size,
                reply=new_reply() if new_reply else None,
                answer=new_answer() if new_answer else None,
            )

        return new_budget

    def has_grammar(self, params: SamplingParams, turn: ChatTurn | None) -> bool:
        """Whether the grammars of such a request are compiled already, or none is needed; its rules likewise."""
        if not self._rules.is_ready(params):
            return False
        turns = [turn, turn.without_thought()] if turn is not None and has_budget(turn) else [turn]
        return all(self._grammars.has_compiled(each, params.structured_outputs) for each in turns)

    def compile_grammar(self, params: SamplingParams, turn: ChatTurn | None) -> None:
        """Compile the grammars of such a request, which `to_sequences` finds; for another thread, beside the steps.

        Raises InvalidRequest for a form that cannot be enforced.
        """
        self._grammar(params, turn)
        self._rules.prepare(params)

    def _encode_markers(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode_with_special(text) if text else []

    def _text_with_markers(self, ids: Many[int]) -> str:
        assert self._tokenizer is not None
        return b"".join(map(self._tokenizer.token_bytes, ids)).decode("utf-8", "replace")

    def encode(self, prompt: str | Many[int]) -> Many[int]:
        """The token ids of a prompt; ids are returned as they are."""
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer; send token ids", "prompt")
        return self._tokenizer.encode(prompt)

    def _check_prompt(self, prompt_ids: Many[int]) -> None:
        if not prompt_ids:
            raise InvalidRequest("the prompt is empty; send at least one token", "prompt")
        if len(prompt_ids) >= self._max_length:
            raise InvalidRequest(
                f"the prompt has {len(prompt_ids)} tokens and the model's context {self._max_length}, the answer's "
                "included; send a shorter prompt",
                "prompt",
            )
        self._check_vocabulary("the prompt", "prompt", prompt_ids)

    def _place_media(self, prompt_ids: Many[int], media: Many[EncodedMedia]) -> tuple[PromptMedia, ...]:
        """Where files are in a prompt; raises InvalidRequest if it has not as many places for them."""
        images = [one for one in media if one.kind != "sound"]  # and videos
        sounds = [one for one in media if one.kind == "sound"]
        placed = [*self._place_images(prompt_ids, images), *self._place_sounds(prompt_ids, sounds)]
        return tuple(sorted(placed, key=lambda part: part.start))

    def _place_images(self, prompt_ids: Many[int], images: Many[EncodedMedia]) -> Iterator[PromptMedia]:
        if self._vision is None:
            if images:
                raise InvalidRequest("this model reads no images; leave the images out", "prompt")
            return iter(())
        if isinstance(self._vision, PretrainedVision) and self._vision.reader.reads_one and len(images) > 1:
            raise InvalidRequest(f"the prompt has {len(images)} images, and {ONE_IMAGE}", "prompt")
        tokens: dict[MediaKind, int] = {"image": self._vision.image_id, "video": self._vision.token_of_videos}
        is_divided = self._vision.is_divided and all(image.grid is None for image in images)
        return placed_parts(
            "images",
            prompt_ids,
            self._vision.ids,
            images,
            tokens=None if is_divided else tokens,
            is_whole=self._vision.attends_both_ways,
        )

    def _place_sounds(self, prompt_ids: Many[int], sounds: Many[EncodedMedia]) -> Iterator[PromptMedia]:
        if self._sounds is None:
            if sounds:
                raise InvalidRequest("this model reads no sounds; leave the sounds out", "prompt")
            return iter(())
        return placed_parts("sounds", prompt_ids, self._sounds.ids, sounds)

    def _check_token_ids(self, params: SamplingParams) -> None:
        self._check_vocabulary("logit_bias", "logit_bias", [*params.logit_bias])
        self._check_vocabulary("stop_token_ids", "stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("allowed_token_ids", "allowed_token_ids", params.allowed_token_ids or ())

    def _check_vocabulary(self, name: str, parameter: str, ids: Many[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):  # of a long prompt, between two steps
            raise InvalidRequest(f"{name} has token ids outside of 0 … {self._vocab_size - 1}", parameter)

    def _to_sequence(
        self,
        request_id: str,
        index: int,
        prompt_ids: Many[int],
        params: SamplingParams,
        seed: int,
        generated: Many[int],
        new_grammar: NewGrammar | None,
        repeats: DryPenalty | None,
        marker_texts: Mapping[int, str],
    ) -> Sequence:
        max_length = self._max_length if params.max_tokens is None else len(prompt_ids) + params.max_tokens
        detokenizer: IncrementalDetokenizer = NoDetokenizer()
        if self._tokenizer is not None:
            detokenizer = self._tokenizer.detokenizer(
                prompt_ids,
                stop=params.stop,
                include_stop=params.include_stop,
                skip_special=params.skip_special_tokens,
                marker_texts=marker_texts,
            )
        if generated:
            detokenizer.push(generated)
        return Sequence(
            request_id=request_id,
            index=index,
            tokens=[*prompt_ids, *generated],
            num_prompt=len(prompt_ids),
            params=params,
            seed=(seed + index * SEED_STRIDE) % 2**64,
            max_length=min(max_length, self._max_length),
            detokenizer=detokenizer,
            grammar=new_grammar() if new_grammar else None,
            repeats=repeats,
        )


def placed_parts(
    what: str,
    prompt_ids: Many[int],
    own_ids: frozenset[int],
    media: Many[EncodedMedia],
    *,
    tokens: Mapping[MediaKind, int] | None = None,
    is_whole: bool = False,
) -> Iterator[PromptMedia]:
    """The parts of files in a prompt; raises InvalidRequest unless it has as many places for them.

    `tokens` are those of each kind; None: several may be among those of a file, and others between them.
    """
    places = media_places(prompt_ids, own_ids)
    lengths = [len(one.features) for one in media]
    fits = sum(map(len, places)) == sum(lengths)
    if tokens is not None:
        needed = [tokens[one.kind] for one in media for _ in range(one.num_places)]
        fits = [*map(len, places)] == place_lengths(media) and [prompt_ids[one.start] for one in places] == needed
    if not fits or (places and places[-1].stop == len(prompt_ids)):
        raise InvalidRequest(
            f"the prompt has {listed(map(len, places))} tokens in the places of {what}, and the {what} need "
            f"{listed(lengths if tokens is None else place_lengths(media))}; send {what} in the messages of a chat",
            "prompt",
        )
    return (
        PromptMedia(part.start, part.stop, media[number], is_whole, first)
        for part, number, first in media_parts(places, lengths)
    )


def media_places(prompt_ids: Many[int], own_ids: frozenset[int]) -> list[range]:
    """The places of files in a prompt; other tokens are between them."""
    places: list[range] = []
    if not own_ids.isdisjoint(prompt_ids):
        for place, token in enumerate(prompt_ids):
            if token in own_ids:
                is_next = places and places[-1].stop == place
                places.append(range(places.pop().start if is_next else place, place + 1))
    return places


def media_parts(places: Many[range], lengths: Many[int]) -> Iterator[tuple[range, int, int]]:
    """The parts in these places: which file it is, and which of its embeddings is the first."""
    number = first = 0
    for place in places:
        start = place.start
        while start < place.stop:
            stop = min(place.stop, start + lengths[number] - first)
            yield range(start, stop), number, first
            first += stop - start
            start = stop
            if first == lengths[number]:
                number, first = number + 1, 0


def place_lengths(media: Many[EncodedMedia]) -> list[int]:
    """The tokens of each place, where a video may have several."""
    return [len(one.features) // one.num_places for one in media for _ in range(one.num_places)]


def listed(numbers: Iterable[int]) -> str:
    return " + ".join(map(str, numbers)) or "0"


def has_budget(turn: ChatTurn) -> bool:
    return turn.max_reasoning_tokens is not None and (turn.may_think or turn.starts_in_thought)


def matcher_of(grammar: Grammar | None, params: SamplingParams) -> NewGrammar | None:
    if grammar is None:
        return None
    return lambda: grammar.matcher(ignore_eos=params.ignore_eos)


def is_torch_seeded() -> bool:
    """Whether the program has called `torch.manual_seed`; PyTorch begins with 64 random bits."""
    seed = torch.initial_seed()
    return seed != FIRST_SEED or seed < 2**32


def new_seed() -> int:
    """The seed of a request without one: from PyTorch's generator after `torch.manual_seed`, else random."""
    return int(torch.randint(2**63 - 1, ()).item()) if is_torch_seeded() else secrets.randbits(63)
