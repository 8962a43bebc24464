"""Engine: sequences join, every step gives each of those that run a token or more, and they leave."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flambeau.llm.compute.forward import Forward
from flambeau.llm.compute.runner import Runner
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import BadRequest
from flambeau.llm.facts import PLAIN, EngineFacts, dtype_of
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.outputs import Completion, Counts, Output
from flambeau.llm.quantize.settings import read_settings
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.scheduling.blocks import BlockPool
from flambeau.llm.scheduling.finishing import accept
from flambeau.llm.scheduling.scheduler import Scheduler
from flambeau.llm.scheduling.sequence import NoText, Sequence, Text
from flambeau.llm.speculation.making import Draft, make_speculator
from flambeau.llm.stepping import Made, Stepper
from flambeau.llm.text.text_stream import TextStream
from flambeau.llm.text.tokenizer import Tokenizer

SEED_STRIDE = 0x9E3779B97F4A7C15  # apart from each other: the choices of one request
NO_NUMBERS = (
    "the network's logits are no finite numbers, or the request's settings leave no token to choose; check the "
    "checkpoint and its dtype (float16 overflows where bfloat16 does not), and logit_bias"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """How busy an engine is."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_preempted: int


class Engine:
    """Generates for many requests at a time. Not for several threads: whoever owns it calls it."""

    def __init__(
        self,
        arch: Architecture,
        forward: Forward,
        *,
        num_blocks: int,
        config: EngineConfig,
        device: str = "cpu",
        tokenizer: Tokenizer | None = None,
        draft: Draft | None = None,
    ) -> None:
        self.arch, self.config, self.tokenizer, self.device = arch, config, tokenizer, device
        self._forward = forward
        self._pool = BlockPool(num_blocks, config.block_size, keeps_prefixes=config.prefix_cache)
        capacity = self._pool.num_blocks * config.block_size
        self.max_length = min(config.max_model_len or arch.max_length, arch.max_length, capacity)
        self._scheduler = Scheduler(
            self._pool, max_num_seqs=config.max_num_seqs, max_step_tokens=config.max_step_tokens
        )
        self._runner = Runner(
            forward,
            max_num_seqs=config.max_num_seqs,
            max_blocks=self._pool.num_needed(self.max_length + config.speculate_k),  # padding may go beyond the end
            block_size=config.block_size,
        )
        self._eos_ids = {*arch.eos_ids, *(tokenizer.eos_ids if tokenizer else ())}
        sampler = Sampler(arch.vocab_size, eos_ids=[*self._eos_ids], device=device)
        self._draft = draft
        self._stepper = Stepper(self._runner, sampler, make_speculator(config, self._runner, sampler, draft))
        self._requests: dict[str, list[Sequence]] = {}
        self._names = itertools.count(1)

    @classmethod
    def from_pretrained(cls, path: str | Path, config: EngineConfig | None = None, **options: object) -> Engine:
        """An engine for the checkpoint in a folder; options are fields of EngineConfig."""
        from flambeau.llm.making import make_engine

        return make_engine(Path(path), config, **options)

    @property
    def model(self) -> object:
        """The network behind it, or this rank's part of it."""
        return getattr(self._forward, "model", None)

    @property
    def draft_model(self) -> object:
        """The network that proposes tokens, where one does."""
        return getattr(self._draft.forward, "model", None) if self._draft else None

    @property
    def facts(self) -> EngineFacts:
        """What it runs with."""
        config, written = self.config, read_settings(self.arch.source)
        kind = config.speculation or ("draft" if self._draft else None)
        return EngineFacts(
            device=self.device,
            dtype=dtype_of(self.model),
            quantization=written.kind if written else config.quantization,
            num_blocks=self._pool.num_blocks,
            block_size=config.block_size,
            max_length=self.max_length,
            speculation=kind if config.speculate_k > 0 else None,
            speculate_k=config.speculate_k,
            decode=getattr(self._forward, "quicker", "") or PLAIN,
        )

    # ---- requests ----

    def add(
        self,
        request_id: str,
        prompt_ids: Many[int],
        params: SamplingParams,
        *,
        generated: Many[Many[int]] = (),
        seed: int | None = None,
    ) -> None:
        """Let a request join; `generated` are the tokens its choices have already, and it goes on from there."""
        if request_id in self._requests:
            raise BadRequest(f"request {request_id!r} is running already")
        self._check_prompt(prompt_ids)
        self._check_token_ids(params)
        if seed is None:
            seed = secrets.randbits(63) if params.seed is None else params.seed
        choices = [
            self._new_sequence(request_id, i, prompt_ids, params, seed, generated[i] if i < len(generated) else ())
            for i in range(params.n)
        ]
        if not all(sequence.room > 0 for sequence in choices):
            raise BadRequest(
                f"the text so far leaves no room for another token: the context has {self.max_length}, the prompt "
                f"{len(prompt_ids)}; send a shorter prompt or ask for more tokens",
                "prompt",
            )
        self._requests[request_id] = choices
        if any(sequence.num_generated for sequence in choices):  # their prompts differ
            for sequence in choices:
                self._scheduler.add(sequence)
        else:
            choices[0].siblings = choices[1:]
            self._scheduler.add(choices[0])

    def _check_prompt(self, prompt_ids: Many[int]) -> None:
        if not prompt_ids:
            raise BadRequest("the prompt is empty; send at least one token", "prompt")
        if len(prompt_ids) >= self.max_length:
            raise BadRequest(
                f"the prompt has {len(prompt_ids)} tokens and the model's context {self.max_length}, the answer's "
                "included; send a shorter prompt",
                "prompt",
            )
        if not all(0 <= token < self.arch.vocab_size for token in prompt_ids):
            raise BadRequest(f"the prompt has token ids outside of 0 … {self.arch.vocab_size - 1}", "prompt")

    def _check_token_ids(self, params: SamplingParams) -> None:
        for name in ("logit_bias", "stop_token_ids"):
            if not all(0 <= token < self.arch.vocab_size for token in getattr(params, name)):
                raise BadRequest(f"{name} has token ids outside of 0 … {self.arch.vocab_size - 1}", name)

    def _new_sequence(
        self,
        request_id: str,
        index: int,
        prompt_ids: Many[int],
        params: SamplingParams,
        seed: int,
        generated: Many[int],
    ) -> Sequence:
        most = self.max_length if params.max_tokens is None else len(prompt_ids) + params.max_tokens
        text: Text = NoText()
        if self.tokenizer is not None:
            text = TextStream(self.tokenizer, prompt_ids, stop=params.stop, include_stop=params.include_stop)
        if generated:
            text.push(generated)
        return Sequence(
            request_id=request_id,
            index=index,
            tokens=[*prompt_ids, *generated],
            num_prompt=len(prompt_ids),
            params=params,
            seed=(seed + index * SEED_STRIDE) % 2**64,
            max_length=min(most, self.max_length),
            text=text,
        )

    def cancel(self, request_id: str) -> None:
        """Nobody waits for it: its blocks are free at once."""
        for sequence in self._requests.pop(request_id, []):
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._runner.tables.forget(sequence)
        self._stepper.forget(sequence)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    @property
    def state(self) -> EngineState:
        """How busy it is."""
        return EngineState(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_blocks=self._pool.num_blocks,
            num_blocks_used=self._pool.num_used,
            num_preempted=self._scheduler.num_preempted,
        )

    # ---- steps ----

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Compute one step: everybody who runs gets a token or more, prompts are computed in chunks."""
        plan = self._scheduler.plan(self._stepper.num_ahead(self._scheduler.running))
        for sequence in plan.preempted:
            self._runner.tables.forget(sequence)
        made = self._stepper.run(plan)
        for chunk in plan.chunks:
            if not chunk.is_last:
                self._scheduler.computed(chunk.sequence, chunk.sequence.num_computed + chunk.length)
        outputs = [self._output(each) for each in made]
        # Whoever got a token has its prompt computed, also where the last of it came alone and looked like a decode.
        for each in made:
            if each.sequence.siblings:
                self._scheduler.add_first(each.sequence.siblings)
                each.sequence.siblings = []
        return outputs

    def _output(self, made: Made) -> Output:
        """Give a sequence its new tokens; it leaves if one of them is its last."""
        sequence, before = made.sequence, len(made.sequence.tokens)
        text = accept(sequence, made.ids, self._eos_ids)
        if made.is_broken and sequence.finish_reason is None:
            text += sequence.text.flush()
            sequence.finish_reason = "error"
        # The last token is not in the cache: it is computed with the next step.
        self._scheduler.computed(sequence, len(sequence.tokens) - 1)
        reason, new_ids = sequence.finish_reason, sequence.tokens[before:]
        output = Output(
            request_id=sequence.request_id,
            index=sequence.index,
            text=text,
            token_ids=new_ids,
            tokens=made.tokens and made.tokens[: len(new_ids)],
            finish_reason=reason,
            error=NO_NUMBERS if reason == "error" else "",
            counts=Counts.of(sequence) if reason else None,
            seed=sequence.seed,
        )
        if reason:
            self._finish(sequence)
        return output

    def _finish(self, sequence: Sequence) -> None:
        self._leave(sequence)
        choices = self._requests.get(sequence.request_id, [])
        if all(choice.finish_reason for choice in choices):
            self._requests.pop(sequence.request_id, None)

    # ---- as a library ----

    def generate(
        self, prompts: str | Many[str] | Many[Many[int]], params: SamplingParams | None = None, **options: Any
    ) -> list[Completion]:
        """All choices of all prompts, whole, in order; options are fields of SamplingParams."""
        params = replace(params or SamplingParams(), **options)
        many = [prompts] if isinstance(prompts, str) else [*prompts]
        names = [f"generate-{next(self._names)}" for _ in many]
        completions = {(name, i): Completion() for name in names for i in range(params.n)}
        try:
            for name, prompt in zip(names, many, strict=True):
                self.add(name, self._encode(prompt), params)
            while any(name in self._requests for name in names):
                for output in self.step():
                    if (completion := completions.get((output.request_id, output.index))) is not None:
                        completion.add(output)
        finally:  # one of them was refused, or whoever waits has lost patience
            for name in names:
                self.cancel(name)
        return [*completions.values()]

    def stream(self, prompt: str | Many[int], params: SamplingParams | None = None, **options: Any) -> Iterator[Output]:
        """What each step makes for one prompt; closing the iterator cancels it."""
        params = replace(params or SamplingParams(), **options)
        name = f"stream-{next(self._names)}"
        self.add(name, self._encode(prompt), params)
        try:
            while name in self._requests:
                yield from (output for output in self.step() if output.request_id == name)
        finally:
            self.cancel(name)

    def _encode(self, prompt: str | Many[int]) -> Many[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise BadRequest("this engine has no tokenizer; send token ids", "prompt")
        return self.tokenizer.encode(prompt)

    def wait_until_compiled(self) -> None:
        """Wait for what is compiled beside the steps, where anything is: for measuring."""
        for forward in (self._forward, self._draft and self._draft.forward):
            wait = getattr(forward, "wait_until_compiled", None)
            if wait is not None:
                wait()

    def close(self) -> None:
        """Stop whatever runs beside the steps."""
        self._forward.close()
        if self._draft is not None:
            self._draft.forward.close()
