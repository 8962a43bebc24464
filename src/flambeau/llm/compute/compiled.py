"""CompiledForward: answers at once, operation by operation, and by something quicker from the step after it is ready.

What is quicker: the kernels' whole step for a plain network, else what Inductor makes of it; on a GPU a CUDA graph of
either.

Shapes: T tokens of the step · N rows of them · V vocabulary
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from flambeau.llm.compute.forward import EagerForward, Greedy
from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.kernels import inductor
from flambeau.llm.kernels.binding import kernels
from flambeau.llm.kernels.gpu.graphs import Graphs
from flambeau.llm.kernels.native import LONGEST_PROMPT, choose_attention
from flambeau.llm.kernels.network import NativeNetwork, can_compute
from flambeau.llm.models.transformer import Transformer

log = logging.getLogger(__name__)

Decode = Callable[[StepInputs], Tensor]
Make = Callable[[], Decode]

# Compiling takes half a minute of a CPU that also serves: only what runs for long is worth it.
STEPS_WORTH_COMPILING = 500
CLOSING_S = 1.0


class Workshop:
    """One thread that makes things beside the steps, in the order in which they are first asked for."""

    def __init__(self) -> None:
        self._asked: set[Hashable] = set()
        self._made: dict[Hashable, Decode] = {}
        self._orders: queue.SimpleQueue[tuple[Hashable, Make] | None] = queue.SimpleQueue()
        self._is_idle = threading.Condition()
        self._num_open = 0
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def find(self, key: Hashable, make: Make) -> Decode | None:
        """What was made under this key; None while it is being made, which is begun when it is first asked for."""
        made = self._made.get(key)
        if made is None and key not in self._asked and not self._has_failed:
            self._asked.add(key)
            with self._is_idle:
                self._num_open += 1
            self._orders.put((key, make))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="compiling", daemon=True)
                self._thread.start()
        return made

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            key, make = order
            try:
                if not self._has_failed:
                    self._made[key] = make()
            except Exception as error:
                # Steps go on as they are; what failed once would fail again, for every number of sequences.
                self._has_failed = True
                log.warning("decoding is not compiled, and slower for it: %s", summary(error))
                log.debug("compilation failed", exc_info=True)
            del order, make  # else this thread would be the one to free the model, perhaps as the process ends
            with self._is_idle:
                self._num_open -= 1
                self._is_idle.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was asked for is made or has failed."""
        with self._is_idle:
            return self._is_idle.wait_for(lambda: self._num_open == 0, timeout_s)

    def close(self) -> None:
        """Make nothing more. What takes long is left to its thread, which ends with the process at the latest."""
        self._has_failed = True
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join(CLOSING_S)  # a thread that Python's end finds within PyTorch takes the process down


class CompiledForward:
    """Decode steps of what the workshop has made so far, and every other step as EagerForward computes it."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        max_num_seqs: int = 64,
        max_blocks: int = 1,
        patience: int = STEPS_WORTH_COMPILING,
        name: str = "the model",
    ) -> None:
        self.model, self._cache = model, cache
        self._eager = EagerForward(model, cache)
        self._workshop = Workshop()
        self._patience = patience  # plain steps of a shape before the CPU's compiler is asked for it
        self._num_plain: Counter[Hashable] = Counter()
        self.device = cache.keys[0].device
        self.quicker = ""  # what computes decode steps, where it is no longer PyTorch, operation by operation
        self._name = name  # in logs
        self._native: NativeNetwork | None = None
        self._is_plain = can_compute(model, cache)
        self._graphs: Graphs | None = None
        if self.device.type == "cuda":
            sizes = {"max_num_seqs": max_num_seqs, "max_blocks": max_blocks}
            self._graphs = Graphs(self._eager, cache, self._workshop, **sizes)
        elif self._is_plain:
            self._workshop.find("native", self._make_native)

    @property
    def greedy(self) -> Greedy | None:
        """The kernels' whole step, once it is there; on a GPU always something."""
        return self._native or self._graphs

    @torch.inference_mode()
    def decode(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V] of every token, where each sequence has `inputs.query_len` of them."""
        if self._native is not None:
            return self._native.run(inputs)
        if self._graphs is not None:
            return self._graphs.decode(inputs)
        quick = self._find(inputs)
        if quick is None:
            return self._eager.decode(inputs)
        if not self.quicker:
            self._tell("Inductor" if self._graphs is None else "CUDA graphs")
        return quick(inputs)

    @torch.inference_mode()
    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """The logits [N, V] of these tokens of a step whose sequences have any number of them."""
        num_tokens, num_sequences = inputs.ids_T.shape[0], inputs.context_lens_S.shape[0]
        if self._native is not None and num_tokens <= LONGEST_PROMPT * num_sequences:
            return self._native.run(inputs, rows_N)
        return self._eager.prefill(inputs, rows_N)

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        """Wait for what steps have asked for so far: for measuring, and for tests."""
        return self._workshop.wait(timeout_s)

    def close(self) -> None:
        """Compile nothing more."""
        self._workshop.close()

    def _find(self, inputs: StepInputs) -> Decode | None:
        num_sequences = inputs.context_lens_S.shape[0]
        if self._is_plain:
            return None  # the kernels are on their way, or cannot be built here
        # One sequence is a shape of its own to the compiler; all other numbers share one.
        number = min(num_sequences, 2)
        key = (inputs.query_len, number)
        self._num_plain[key] += 1
        if self._num_plain[key] <= self._patience:
            return None
        return self._workshop.find(key, lambda: self._make_inductor(inputs.query_len, number))

    def _make_native(self) -> Decode:
        if not kernels.load():
            return self._eager.decode
        self._native = NativeNetwork(self.model, self._cache)
        self._tell("CPU kernels")
        return self._native.run

    def _tell(self, quicker: str) -> None:
        """Say once what decodes from now on; other shapes of a step follow as they are asked for."""
        self.quicker = quicker
        log.info("%s is decoded by %s from now on", self._name, quicker)

    def _make_inductor(self, query_len: int, num_sequences: int) -> Decode:
        kernels.load()
        example = inductor.trash_inputs(num_sequences, query_len, 2, self.device)
        return inductor.compile_step(self.model, self._cache, query_len, choose_attention, example)


def summary(error: BaseException) -> str:
    """The first lines of a compiler's long message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or repr(error)
