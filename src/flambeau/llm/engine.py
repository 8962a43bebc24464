"""Engine: requests join, each step generates one or more tokens for every running sequence, and requests leave."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flambeau.llm.chat.chat_format import ChatTurn
from flambeau.llm.config import EngineConfig
from flambeau.llm.core.block_pool import BlockPool
from flambeau.llm.core.outputs import Completion, Output
from flambeau.llm.core.prefix_restores import PrefixRestores
from flambeau.llm.core.scheduler import Scheduler
from flambeau.llm.core.sequence import EncodedMedia
from flambeau.llm.core.state_slots import StateSlots
from flambeau.llm.core.step_limits import StepLimits
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.executor.backend import Backend
from flambeau.llm.executor.draft import DraftModel
from flambeau.llm.executor.executor import ModelExecutor, StartedStep
from flambeau.llm.executor.head import HeadModel, HeadRounds
from flambeau.llm.executor.inputs import InputBuilder
from flambeau.llm.executor.speculators import make_speculator, num_recomputed_blocks
from flambeau.llm.executor.state_cache import StateCache
from flambeau.llm.images.image_encoder import ImageEncoder
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.images.video_files import VideoFile
from flambeau.llm.input_processor import InputProcessor
from flambeau.llm.kv_store.block_store import BlockStore
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.named_adapters import Adapters, NamedAdapters
from flambeau.llm.quantize.settings import read_quantization
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.sounds.sound_clip import SoundClip
from flambeau.llm.sounds.sound_encoder import SoundClipEncoder
from flambeau.llm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
# Of a step that lighter tenants may wait for: a step with fewer tokens takes about as long.
SHORT_STEP_TOKENS = {"cpu": 32, "cuda": 256}
# How many times as long a step may be in which no sequence decodes: on a GPU, more tokens at a time are faster.
PROMPT_STEPS = {"cpu": 1, "cuda": 4}
# Of a prompt behind a long context: on a CPU, few tokens are computed there as fast as many, one by one.
MIN_LATE_CHUNK = {"cpu": 8, "cuda": 256}
RESTORE_WAIT_S = 0.005  # a step waits no longer, so that new requests are accepted


class Engine:
    """Generates for many requests at a time.

    Not thread-safe: one thread makes all calls, except `encode_images` and `encode_sounds`.
    """

    def __init__(
        self,
        arch: Architecture,
        backend: Backend,
        *,
        num_blocks: int,
        state_cache: StateCache | None = None,
        config: EngineConfig,
        device: str = "cpu",
        tokenizer: Tokenizer | None = None,
        draft: DraftModel | HeadModel | None = None,
        adapters: Adapters | None = None,
        images: ImageEncoder | None = None,
        sounds: SoundClipEncoder | None = None,
        whole_prompts: bool = False,
        store: BlockStore | None = None,
    ) -> None:
        slots = StateSlots(*((state_cache.num_slots, state_cache.num_spare) if state_cache is not None else ()))
        if arch.recurrence is not None:
            config = with_spare_slots(config, draft, slots.num_spare)
        self.images, self.sounds = images, sounds  # None: it reads none
        self.arch, self.config, self.tokenizer, self.device = arch, config, tokenizer, device
        self._backend, self._draft = backend, draft
        self._pool = BlockPool(
            num_blocks, config.block_size, prefix_cache=config.prefix_cache, store=store, on_evict=slots.drop
        )
        self._store = store
        self._restores = PrefixRestores(self._pool, store) if store else None
        if store is not None:
            self._pool.set_root(0, store.root)
            store.connect(self._pool)
        capacity = self._pool.num_blocks * config.block_size
        self.max_length = min(config.max_model_len or arch.max_length, arch.max_length, capacity)
        eos_ids = {*arch.eos_ids, *(tokenizer.eos_ids if tokenizer else ())}
        self._inputs = InputProcessor(
            vocab_size=arch.vocab_size,
            max_length=self.max_length,
            tokenizer=tokenizer,
            eos_ids=eos_ids,
            vision=images.arch if images is not None else None,
            sounds=sounds.arch if sounds is not None else None,
        )
        sampler = Sampler(arch.vocab_size, eos_ids=[*eos_ids], device=device)
        builder = InputBuilder(
            max_num_seqs=config.max_num_seqs,
            max_blocks=self._pool.num_needed(self.max_length + config.speculate_k),  # padding may go beyond the end
            block_size=config.block_size,
        )
        speculator = make_speculator(config, builder, sampler, draft)
        self._executor = ModelExecutor(backend, builder, sampler, speculator, state_cache)
        self._scheduler = Scheduler(
            self._pool,
            step_limits(config, arch, device, whole_prompts=whole_prompts),
            eos_ids=eos_ids,
            on_remove=self._executor.forget,
            state_slots=slots,
            restores=self._restores,
            switch_length=arch.switch_length,
            num_recomputed_blocks=num_recomputed_blocks(config, draft),
        )
        self._started: StartedStep | None = None  # before its tokens were needed
        self._names = itertools.count(1)
        self._adapters = NamedAdapters(
            adapters,
            self._pool,
            store,
            merged=config.lora_adapters if config.merge_lora else (),
            is_used=self._scheduler.uses_adapter,
        )
        for name, folder in config.lora_adapters.items() if not config.merge_lora else ():
            self.load_adapter(name, folder)

    @classmethod
    def from_pretrained(cls, path: str | Path, config: EngineConfig | None = None, **options: object) -> Engine:
        """Load the checkpoint in a folder; options are fields of EngineConfig."""
        from flambeau.llm.loader import load_engine

        return load_engine(Path(path), config, **options)

    # ---- requests and steps ----

    def add(
        self,
        request_id: str,
        prompt_ids: Many[int],
        params: SamplingParams,
        *,
        generated: Many[Many[int]] = (),
        seed: int | None = None,
        adapter: str = "",
        turn: ChatTurn | None = None,
        tenant: str = "",
        scores_prompt: bool = False,
        media: Many[EncodedMedia] = (),
        cache_salt: str = "",
    ) -> None:
        """Add a request; it continues after the tokens in `generated`, one list per choice.

        With a `turn` of a chat, the text has the markers that its parser needs. Requests of different tenants take
        turns while they wait. With `scores_prompt`, or `prompt_logprobs`, the first output of each choice has the
        log-probabilities of the prompt's tokens. Only requests with the same `cache_salt` share the prefix cache.
        `media` are the files that the prompt has places for: images and videos in their order, and
        sounds in theirs.
        """
        if self._scheduler.has_request(request_id):
            raise InvalidRequest(f"request {request_id!r} is running already")
        number = self._adapters.number_of(adapter)
        sequences = self._inputs.to_sequences(
            request_id, prompt_ids, params, generated=generated, seed=seed, adapter=number, turn=turn, media=media
        )
        for sequence in sequences:
            sequence.tenant, sequence.cache_salt = tenant, cache_salt
            sequence.scores_prompt = scores_prompt or params.prompt_logprobs is not None
        self._scheduler.add(sequences)

    def has_grammar(self, params: SamplingParams, turn: ChatTurn | None) -> bool:
        """Whether `add` of such a request would compile no grammar, which may take a second."""
        return self._inputs.has_grammar(params, turn)

    def compile_grammar(self, params: SamplingParams, turn: ChatTurn | None) -> None:
        """Compile the grammar of such a request for `add`; may be called from another thread, beside the steps."""
        self._inputs.compile_grammar(params, turn)

    def encode_images(
        self, files: Many[ImageFile | VideoFile], is_cancelled: Callable[[], bool] = lambda: False
    ) -> list[EncodedMedia]:
        """The embeddings of images and videos, for `add`; may be called from another thread, beside the steps.

        Raises InvalidRequest, which names the file that cannot be read. Nothing is returned once it is cancelled.
        """
        if not files:
            return []
        if self.images is None:
            what = "a video" if isinstance(files[0], VideoFile) else "an image"
            raise InvalidRequest(f"{files[0].name} is {what}, and this model reads no images and videos", files[0].name)
        return self.images.encode(files, is_cancelled)

    def encode_sounds(
        self, sounds: Many[SoundClip], is_cancelled: Callable[[], bool] = lambda: False
    ) -> list[EncodedMedia]:
        """The embeddings of sounds, for `add`; otherwise like `encode_images`."""
        if not sounds:
            return []
        if self.sounds is None:
            raise InvalidRequest(f"{sounds[0].name} is a sound, and this model reads no sounds", sounds[0].name)
        return self.sounds.encode(sounds, is_cancelled)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its blocks at once; unknown ids are ignored."""
        self._scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Generate one or more tokens for every running sequence; prompts are computed in chunks."""
        if self._restores is not None and self._restores.has_any:
            self._restores.finish()
        started, self._started = self._started, None
        if started is None or started.has_ended:
            plan = self._scheduler.plan(self._executor.lookahead(self._scheduler.running))
            if plan.is_empty and self._restores is not None and self._restores.has_any:
                self._restores.wait(RESTORE_WAIT_S)
                return []
            started = self._executor.start(plan)
        self._executor.choose(started)
        # The next step is started before this one's tokens are read, so that the device does not wait for the host.
        if started.tokens is not None and (next_plan := self._scheduler.plan_next(started.plan)) is not None:
            self._started = self._executor.start_next(started, next_plan)
        outputs = self._scheduler.update(started.plan, self._executor.finish(started))
        if self._started is not None:
            self._executor.prepare(self._started)
        self._adapters.free_unused()
        return outputs

    # ---- adapters ----

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that requests may ask for."""
        return self._adapters.names

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter; requests may name it from now on. Raises LLMError if it cannot be used."""
        self._adapters.load(name, Path(folder))

    def unload_adapter(self, name: str) -> None:
        """Accept no more requests for an adapter; it is freed when the last one that runs has ended."""
        self._adapters.unload(name)

    # ---- as a library ----

    def generate(
        self,
        prompts: str | Many[str] | Many[Many[int]],
        params: SamplingParams | None = None,
        *,
        adapter: str = "",
        media: Many[Many[EncodedMedia]] = (),
        **options: Any,
    ) -> list[Completion]:
        """All choices of all prompts, in order; options are fields of SamplingParams.

        `media` are the files of each prompt, if prompts have any; see `encode_images` and `encode_sounds`.
        """
        params = replace(params or SamplingParams(), **options)
        many = [prompts] if isinstance(prompts, str) else [*prompts]
        names = [f"generate-{next(self._names)}" for _ in many]
        completions = {(name, i): Completion() for name in names for i in range(params.n)}
        try:
            for name, prompt, own in zip(names, many, media or [()] * len(many), strict=True):
                self.add(name, self._inputs.encode(prompt), params, adapter=adapter, media=own)
            while any(map(self._scheduler.has_request, names)):
                for output in self.step():
                    if (completion := completions.get((output.request_id, output.index))) is not None:
                        completion.add(output)
        finally:  # after an invalid prompt or an interrupt
            for name in names:
                self.cancel(name)
        return [*completions.values()]

    def stream(
        self, prompt: str | Many[int], params: SamplingParams | None = None, *, adapter: str = "", **options: Any
    ) -> Iterator[Output]:
        """The outputs of each step for one prompt; closing the iterator cancels the request."""
        params = replace(params or SamplingParams(), **options)
        name = f"stream-{next(self._names)}"
        self.add(name, self._inputs.encode(prompt), params, adapter=adapter)
        try:
            while self._scheduler.has_request(name):
                yield from (output for output in self.step() if output.request_id == name)
        finally:
            self.cancel(name)

    # ---- about the engine ----

    @property
    def model(self) -> nn.Module:
        """The network, or this rank's part of it."""
        return self._backend.model

    @property
    def draft_model(self) -> nn.Module | None:
        """The smaller network that drafts; a head is none."""
        return self._draft.backend.model if isinstance(self._draft, DraftModel) else None

    @property
    def speculation(self) -> str | None:
        """How tokens are proposed: by a draft, a head of some kind, or n-grams; None: they are not."""
        kind = self.config.speculation or ("draft" if self._draft else None)
        if self.config.speculate_k < 1:
            return None
        return self._draft.head.settings.kind if isinstance(self._draft, HeadModel) and kind != "lookup" else kind

    @property
    def info(self) -> EngineInfo:
        config, written = self.config, read_quantization(self.arch.source)
        dtype = next(self.model.parameters()).dtype  # of embeddings or norms
        return EngineInfo(
            device=self.device,
            dtype=str(dtype).removeprefix("torch."),
            quantization=written.title if written else config.quantization,
            num_blocks=self._pool.num_blocks,
            block_size=config.block_size,
            max_length=self.max_length,
            speculation=self.speculation,
            speculate_k=config.speculate_k,
            decode=self._backend.decode_path,
        )

    @property
    def state(self) -> EngineState:
        return EngineState(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_blocks=self._pool.num_blocks,
            num_blocks_used=self._pool.num_used,
            num_preempted=self._scheduler.num_preempted,
            num_blocks_saved=self._store.num_saved if self._store else 0,
            num_blocks_restored=self._store.num_restored if self._store else 0,
        )

    def wait_until_compiled(self) -> None:
        """Wait for background compilation, for measurements."""
        for each in self._compiling():
            each.wait_until_compiled()

    def close(self) -> None:
        """Stop background work; what leaves the cache with the engine is written to disk if that is configured."""
        if self._store is not None:
            self._store.close()
        for each in self._compiling():
            each.close()

    def _compiling(self) -> list[Backend | HeadRounds]:
        """What compiles in the background."""
        draft = self._draft
        others = [draft.backend if isinstance(draft, DraftModel) else draft.rounds] if draft is not None else []
        return [self._backend, *(each for each in others if each is not None)]


def step_limits(config: EngineConfig, arch: Architecture, device: str, *, whole_prompts: bool) -> StepLimits:
    """How many tokens a step may have, on this kind of device."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    return StepLimits(
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        prompt_step_tokens=config.max_step_tokens * PROMPT_STEPS[kind],
        short_step_tokens=SHORT_STEP_TOKENS[kind],
        min_late_chunk=MIN_LATE_CHUNK[kind],
        attention_span=arch.attention_span,
        whole_prompts=whole_prompts,
    )


def with_spare_slots(config: EngineConfig, draft: DraftModel | HeadModel | None, num_spare: int) -> EngineConfig:
    """Settings for a network with recurrent layers: no more tokens are proposed than states can be kept."""
    if (config.speculation is None and not config.draft and draft is None) or config.speculate_k <= num_spare:
        return config
    if num_spare:
        logger.warning("speculate_k is %d: there is no memory for more states of proposed tokens", num_spare)
        return replace(config, speculate_k=num_spare)
    logger.warning(
        "speculation is off: there is no memory for the states of proposed tokens; raise kv_cache_bytes, or remove "
        "speculation and draft from the settings"
    )
    return replace(config, speculation=None, draft="", speculate_k=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The settings that result from configuration, checkpoint and machine."""

    device: str
    dtype: str
    quantization: str | None
    num_blocks: int
    block_size: int
    max_length: int
    speculation: str | None  # "draft", "lookup", or the kind of a head: "eagle3", "mtp", "dflash", …
    speculate_k: int
    decode: str  # what computes decode steps at present

    def __str__(self) -> str:
        speculation = f"{self.speculation} of {self.speculate_k} tokens" if self.speculation else "none"
        return (
            f"device {self.device}, dtype {self.dtype}, quantization {self.quantization or 'none'}, "
            f"{self.num_blocks} blocks of {self.block_size} tokens, at most {self.max_length} tokens in a sequence, "
            f"speculation {speculation}, decoding by {self.decode}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """How busy an engine is."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_preempted: int
    num_blocks_saved: int = 0  # to host memory or disk, so far
    num_blocks_restored: int = 0  # from there
