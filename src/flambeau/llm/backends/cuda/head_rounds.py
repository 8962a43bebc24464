"""HeadGraphs: the rounds of a head as CUDA graphs, all passes and the sampling between them in one launch.

The kernels are compiled in the background; a round is captured between two steps by the thread that runs them. There
is a graph for each of a few batch sizes; other batches are padded to the next size.

Shapes: S sequences · F = K + 1 entries of each in the first pass · T = S · F · K tokens proposed · J = K - 1 ·
B blocks of the longest sequence · X numbers of hidden states · D tokens of the head's vocabulary · V vocabulary
"""

from __future__ import annotations

import logging
import math
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.backends.cuda.graphs import GraphCapture, SideStream, TokenChooser, capture_graph, size_for
from flambeau.llm.executor.background_compiler import BackgroundCompiler
from flambeau.llm.executor.head import DrawnRound
from flambeau.llm.executor.head_plans import RoundPlan, last_places, real_places
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.draft_heads import DraftHead
from flambeau.llm.models.embeddings import like_embeddings
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.sampling.row_groups import RowSettings

log = logging.getLogger(__name__)

KERNELS = "kernels"
MAX_SEQUENCES = 64  # of a round; with more, speculation rarely pays, and their logits take much memory


class HeadPasses(Protocol):
    """The passes of a head (`CudaHead`)."""

    head: DraftHead

    @property
    def num_tokens(self) -> int:
        """Of the head's vocabulary."""

    def combine(self, states_TX: Tensor) -> Tensor:
        """Hidden states of the target to what the first pass takes."""

    def run(self, ids_T: Tensor, hidden_TE: Tensor, inputs: StepInputs) -> Tensor:
        """The hidden states from which the head goes on; `hidden_TE` may be overwritten."""

    def draft_logits(self, hidden_TE: Tensor) -> Tensor:
        """Logits [T, D] of the head's own tokens."""


class RoundBuffers:
    """The numbers of a round at fixed addresses. One copy fills all but the block tables, which change rarely."""

    def __init__(self, size: int, num_ahead: int, max_blocks: int, device: torch.device) -> None:
        self.size, self.num_ahead, self.width = size, num_ahead, num_ahead + 1
        shapes = {
            **dict.fromkeys(("ids", "positions", "slots", "rows"), (size, self.width)),
            "last": (size,),
            **dict.fromkeys(("later_positions", "later_slots"), (num_ahead - 1, size)),
            "before": (num_ahead, size),
        }
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        is_on_gpu = device.type == "cuda"
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        # Pinned memory, from which the GPU copies asynchronously.
        self._host_numbers = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=is_on_gpu)
        parts = [torch.split(numbers, sizes) for numbers in (self._numbers, self._host_numbers)]
        views, host = ([part.view(shape) for part, shape in zip(each, shapes.values(), strict=True)] for each in parts)
        self._views = dict(zip(shapes, views, strict=True))
        self._host_views = {name: view.numpy() for name, view in zip(shapes, host, strict=True)}
        self._tables = torch.zeros(size, max_blocks, dtype=torch.int64, device=device)
        self._host_tables = torch.zeros(self._tables.shape, dtype=torch.int64, pin_memory=is_on_gpu)
        self._copied: Any = torch.cuda.Event() if is_on_gpu else None  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def inputs(self, place: int) -> StepInputs:
        """Of the pass for a place: 0 is the first."""
        if place:
            positions, slots = self["later_positions"][place - 1], self["later_slots"][place - 1]
            return self._inputs(positions, slots, 1)
        return self._inputs(self["positions"].flatten(), self["slots"].flatten(), self.width)

    def _inputs(self, positions_T: Tensor, slots_T: Tensor, query_len: int) -> StepInputs:
        starts = torch.arange(self.size + 1, device=positions_T.device) * query_len
        unused = starts[1:]  # kernels take the length of a context from positions
        return StepInputs(positions_T, positions_T, slots_T, starts, unused, self._tables, query_len=query_len)

    def fill(self, plan: RoundPlan) -> None:
        """Copy a plan into the larger buffers; the rest is padding."""
        if self._copied is not None:
            self._copied.synchronize()
        number, host = len(plan.next_S), self._host_views
        self._host_numbers.zero_()
        host["ids"][:number], host["positions"][:number] = plan.ids_SF, plan.positions_SF
        host["slots"][:number] = plan.slots_SF
        places = real_places(plan)
        host["rows"].reshape(-1)[places] = np.arange(len(places))
        host["last"][:number] = last_places(plan).numpy()
        host["later_positions"][:, :number], host["later_slots"][:, :number] = plan.positions_SJ.T, plan.slots_SJ.T
        host["before"][:, :number] = plan.next_S - 1 + np.arange(self.num_ahead)[:, None]
        self._numbers.copy_(self._host_numbers, non_blocking=True)
        current = self._host_tables.numpy()[:number, : plan.tables_SB.shape[1]]
        changed = (current != plan.tables_SB).any(1).nonzero()[0]
        if len(changed):
            current[:] = plan.tables_SB
            rows = slice(changed[0], changed[-1] + 1)
            self._tables[rows].copy_(self._host_tables[rows], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class CapturedRound:
    """A round with its buffers, for any number of sequences up to a size. Until it is captured, it is computed."""

    def __init__(
        self, passes: HeadPasses, buffers: RoundBuffers, chooser: TokenChooser, states_TX: Tensor, logits_KSD: Tensor
    ) -> None:
        self._passes, self._buffers, self._chooser = passes, buffers, chooser
        self._states_TX, self._logits_KSD = states_TX, logits_KSD
        self._ids_KS = torch.zeros(buffers.num_ahead, buffers.size, dtype=torch.int64, device=states_TX.device)
        self._settings: RowSettings | None = None
        self._graph: Any = None

    def capture(self, pool: Any) -> CapturedRound:
        self._graph, _ = capture_graph(self.compute, pool)
        return self

    @torch.inference_mode()
    def run(self, plan: RoundPlan, states_TX: Tensor, settings: RowSettings) -> DrawnRound:
        """Draw with the random numbers that the target will use; `states_TX` are those of all entries, one by one."""
        if self._graph is None:
            self._fill(plan, states_TX, settings)
            self.compute()
        else:
            with torch.cuda.device(self._states_TX.device):
                self._fill(plan, states_TX, settings)
                self._graph.replay()
        number = len(plan.next_S)
        return DrawnRound(self._ids_KS[:, :number].T.clone(), self._logits_KSD[:, :number].transpose(0, 1))

    def _fill(self, plan: RoundPlan, states_TX: Tensor, settings: RowSettings) -> None:
        self._buffers.fill(plan)
        if settings is not self._settings:
            self._chooser.set(settings)
            self._settings = settings
        rows_T = self._buffers["rows"].flatten()
        torch.index_select(states_TX, 0, rows_T, out=self._states_TX)  # padding has the first one's

    def compute(self) -> None:
        """All passes, and the choices between them."""
        passes, buffers = self._passes, self._buffers
        hidden = passes.combine(self._states_TX)
        hidden = passes.run(buffers["ids"].flatten(), hidden, buffers.inputs(0))[buffers["last"]]
        for place in range(buffers.num_ahead):
            if place:
                hidden = passes.run(self._ids_KS[place - 1], hidden, buffers.inputs(place))
            logits_SD = passes.draft_logits(hidden)
            self._logits_KSD[place] = logits_SD
            logits_SV = passes.head.to_target_tokens(logits_SD)
            self._chooser.run(logits_SV, buffers["before"][place], self._ids_KS[place])


class HeadGraphs:
    """The rounds captured so far."""

    def __init__(
        self, head: DraftHead, target: Transformer, cache: KVCache, *, max_num_seqs: int, max_blocks: int
    ) -> None:
        self._head, self._target, self._cache = head, target, cache
        self._device = cache.keys[0].device
        self._max_size = min(size_for(max_num_seqs) or MAX_SEQUENCES, MAX_SEQUENCES)
        self._max_blocks = max_blocks
        self._graphs = GraphCapture()
        self._side_stream = SideStream(self._device)
        self._captured: dict[tuple[int, int], CapturedRound] = {}  # (tokens proposed, batch size) → graph
        self._logits: dict[int, Tensor] = {}  # by the number of tokens proposed; of one round at a time
        self._compiler = BackgroundCompiler[HeadPasses | None]()
        self._compiler.find(KERNELS, self._build_kernels)

    def find(self, num_sequences: int, num_ahead: int) -> CapturedRound | None:
        """The round for so many sequences; captured here if it was compiled since the last call."""
        size = size_for(num_sequences)
        passes = self._compiler.find(KERNELS, self._build_kernels)
        if passes is None or size is None or size > self._max_size:
            return None
        key = (num_ahead, size)
        found = self._captured.get(key)
        if found is None and key not in self._graphs.failed:
            is_compiled = self._compiler.find(key, lambda: self._compile(passes, *key)) is not None
            found = self._capture(passes, key) if is_compiled else None
        if found is None:  # use a larger one meanwhile
            larger = [each for number, each in self._captured if number == num_ahead and each >= size]
            found = self._captured.get((num_ahead, min(larger, default=0)))
        return found

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        return self._compiler.wait(timeout_s)

    def close(self) -> None:
        self._compiler.close()

    def _capture(self, passes: HeadPasses, key: tuple[int, int]) -> CapturedRound | None:
        with torch.inference_mode(), torch.cuda.device(self._device):
            captured = self._graphs.capture(
                key,
                f"proposals of the head for {key[1]} sequences",
                lambda pool: self._new_round(passes, *key, self._shared_logits(passes, *key)).capture(pool),
            )
        if captured is not None:
            if not self._captured:
                log.info("the head (%s) runs on CUDA graphs of GPU kernels", self._head.settings.kind)
            self._captured[key] = captured
        return captured

    def _shared_logits(self, passes: HeadPasses, num_ahead: int, size: int) -> Tensor:
        """[K, S, D], in memory that all rounds of so many tokens share: one runs at a time."""
        if num_ahead not in self._logits:
            count = num_ahead * self._max_size * passes.num_tokens
            self._logits[num_ahead] = torch.zeros(count, device=self._device)
        shape_KSD = num_ahead, size, passes.num_tokens
        return self._logits[num_ahead][: math.prod(shape_KSD)].view(shape_KSD)

    def _new_round(self, passes: HeadPasses, num_ahead: int, size: int, logits_KSD: Tensor) -> CapturedRound:
        from flambeau.llm.backends.cuda.sampling_kernel import TokenChoice  # Triton may not be installed

        settings, device = self._head.settings, self._device
        width = len(settings.layers) * settings.state_size
        dtype = like_embeddings(self._target.model.embed_tokens).dtype
        return CapturedRound(
            passes,
            RoundBuffers(size, num_ahead, self._max_blocks, device),
            TokenChoice(size, self._target.arch.vocab_size, device),
            torch.zeros(size * (num_ahead + 1), width, dtype=dtype, device=device),
            logits_KSD,
        )

    # ---- in the background thread ----

    def _build_kernels(self) -> HeadPasses | None:
        kind = self._head.settings.kind
        try:
            # Triton may not be installed.
            from flambeau.llm.backends.cuda.head import CudaHead, unknown_reason
        except ImportError as error:
            log.warning("the head (%s) runs as plain PyTorch without Triton: pip install triton (%s)", kind, error)
            return None
        reason = unknown_reason(self._head, self._target, self._cache)
        if reason is not None:
            log.info("the head (%s) runs as plain PyTorch: %s", kind, reason)
            return None
        return CudaHead(self._head, self._target, self._cache)

    @torch.inference_mode()
    def _compile(self, passes: HeadPasses, num_ahead: int, size: int) -> HeadPasses:
        """Run a round once, so that everything it needs is compiled."""
        with self._side_stream.running():
            logits_KSD = torch.zeros(num_ahead, size, passes.num_tokens, device=self._device)
            self._new_round(passes, num_ahead, size, logits_KSD).compute()
        return passes
