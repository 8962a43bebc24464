"""CapturedPrompts: the computation of up to a number of prompt tokens as a CUDA graph with fixed input buffers.

Without a graph, the host takes longer to launch the kernels of a few hundred tokens than the GPU to run them.

Shapes: T tokens of the step · S sequences · B blocks of the longest one · M tiles of tokens · N rows of them ·
V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.backends.cuda.graphs import capture_graph
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.models.hidden_states import HiddenStates

SIZES = (8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512)  # tokens; more keep the GPU busy without a graph
MAX_SEQUENCES = 32

Network = Callable[[StepInputs, Tensor, Tensor], Tensor]  # inputs, rows [N] and tiles [M, 3] to logits [N, V]


def size_for(inputs: StepInputs, rows_N: Tensor) -> int | None:
    """The smallest size for these prompts; None if there are too many tokens, sequences or rows."""
    if max(len(inputs.context_lens_S), len(rows_N)) > MAX_SEQUENCES:
        return None
    return next((size for size in SIZES if size >= len(inputs.ids_T)), None)


def room_for(size: int) -> int:
    """How many numbers of 8 bytes so many take, so that the address behind them can be divided by 16."""
    return size + size % 2


def parts_of(numbers: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Parts of these sizes. Triton compiles other kernels for other alignments, and those for tensors are compiled."""
    parts = torch.split(numbers, [room_for(size) for size in sizes.values()])
    return {name: part[: sizes[name]] for name, part in zip(sizes, parts, strict=True)}


class CapturedPrompts:
    """A captured step of prompts. The tokens of padding belong to no tile, and are written to block 0.

    With states, the sequences that fill up the step have no tokens.
    """

    def __init__(
        self,
        network: Network,
        num_tokens: int,
        num_tiles: int,
        max_blocks: int,
        device: torch.device,
        pool: Any,
        states: HiddenStates | None = None,
        *,
        has_adapters: bool = False,
        has_states: bool = False,
    ) -> None:
        self._states = states
        sizes = {"ids": num_tokens, "positions": num_tokens, "slots": num_tokens}
        sizes |= {"rows": MAX_SEQUENCES, "tiles": 3 * num_tiles}
        sizes |= {"adapters": num_tokens} if has_adapters else {}
        sizes |= {"starts": MAX_SEQUENCES + 1, "state_slots": MAX_SEQUENCES} if has_states else {}
        total = sum(map(room_for, sizes.values()))
        self._numbers = torch.zeros(total, dtype=torch.int64, device=device)
        # Pinned memory, from which the GPU copies asynchronously.
        is_on_gpu = device.type == "cuda"
        self._host_numbers = torch.zeros(total, dtype=torch.int64, pin_memory=is_on_gpu)
        self._host_views = {name: view.numpy() for name, view in parts_of(self._host_numbers, sizes).items()}
        self._tables = torch.zeros((MAX_SEQUENCES, max_blocks), dtype=torch.int64, device=device)
        self._host_tables = torch.zeros(self._tables.shape, dtype=torch.int64, pin_memory=is_on_gpu)
        self._copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        views = parts_of(self._numbers, sizes)
        unused = torch.zeros(0, dtype=torch.int64, device=device)  # tiles say which tokens belong to a sequence
        places = views["ids"], views["positions"], views["slots"], views.get("starts", unused)
        inputs = StepInputs(*places, unused, self._tables)
        inputs.adapters_T, inputs.state_slots_S = views.get("adapters"), views.get("state_slots")
        arguments = inputs, views["rows"], views["tiles"].view(-1, 3)

        def run() -> tuple[Tensor, Tensor | None]:
            return network(*arguments), None if states is None else states.take()

        self._graph, (self._logits_NV, self._states_TX) = capture_graph(run, pool)

    def run(self, inputs: StepInputs, rows_N: Tensor, tiles: Tensor) -> Tensor:
        """The logits [N, V] of the tokens at `rows_N`."""
        self._copied.synchronize()
        given = {
            "ids": inputs.ids_T,
            "positions": inputs.positions_T,
            "slots": inputs.slots_T,
            "rows": rows_N,
            "tiles": tiles.flatten(),
            "adapters": inputs.adapters_T,
            "starts": inputs.query_starts,
            "state_slots": inputs.state_slots_S,
        }
        for name, view in self._host_views.items():
            numbers = given[name]
            assert numbers is not None
            view[: len(numbers)] = numbers.cpu().numpy()
            view[len(numbers) :] = len(inputs.ids_T) if name == "starts" else 0
        self._numbers.copy_(self._host_numbers, non_blocking=True)
        num_sequences, num_blocks = inputs.block_tables_SB.shape
        self._host_tables.numpy()[:num_sequences, :num_blocks] = inputs.block_tables_SB.cpu().numpy()
        self._tables[:num_sequences].copy_(self._host_tables[:num_sequences], non_blocking=True)
        self._copied.record()
        self._graph.replay()
        if self._states is not None and self._states_TX is not None:
            self._states.set(self._states_TX[: len(inputs.ids_T)].clone())
        return self._logits_NV[: len(rows_N)].clone()  # the next step overwrites them
