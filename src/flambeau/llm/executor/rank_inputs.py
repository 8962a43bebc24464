"""The inputs of a forward pass, from rank 0 to the other ranks, and headers, which precede all that it sends.

A header of a pass has its kind and the length of every tensor; one that is absent has none. All integers follow in one
tensor, then the embeddings of files, if there are any.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from flambeau.llm.executor.inputs import StepInputs, step_inputs
from flambeau.llm.models.step_media import StepMedia

END, DECODE, PREFILL, LOAD_ADAPTER, UNLOAD_ADAPTER, COPY_STATES = range(6)  # what a header begins with
NUM_TENSORS = 13
HEADER_SIZE = 4 + NUM_TENSORS


def send_header(numbers: list[int], control: dist.ProcessGroup) -> None:
    """Broadcast a header that begins with these numbers."""
    dist.broadcast(torch.tensor([*numbers, *[0] * (HEADER_SIZE - len(numbers))]), src=0, group=control)


def receive_header(control: dist.ProcessGroup) -> list[int]:
    header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
    dist.broadcast(header, src=0, group=control)
    numbers: list[int] = header.tolist()
    return numbers


def send_inputs(kind: int, inputs: StepInputs, rows_N: Tensor | None, control: dist.ProcessGroup) -> None:
    """Broadcast the inputs of the next pass."""
    media = inputs.media
    tensors = [inputs.ids_T, inputs.positions_T, inputs.slots_T, inputs.query_starts, inputs.context_lens_S]
    tensors += [inputs.block_tables_SB]
    others = [rows_N, inputs.state_slots_S, inputs.state_ends_T, inputs.adapters_T]
    others += [None] * 3 if media is None else [media.rows_M, media.last_seen_T, media.rotary_3T]
    absent = torch.empty(0, dtype=torch.int64)
    flat = [absent if one is None else one.flatten().to("cpu", torch.int64) for one in [*tensors, *others]]
    width = 0 if media is None else media.features_ME.shape[1]
    send_header([kind, inputs.query_len, inputs.longest, width, *map(len, flat)], control)
    dist.broadcast(torch.cat(flat), src=0, group=control)
    if media is not None and len(media.rows_M):
        dist.broadcast(media.features_ME.to("cpu", torch.float32).contiguous(), src=0, group=control)


def receive_inputs(
    header: list[int], device: torch.device, control: dist.ProcessGroup
) -> tuple[StepInputs, Tensor | None]:
    """Receive what follows the header of a pass: its inputs, and the rows whose logits a prompt needs."""
    kind, query_len, longest, width, *lengths = header
    numbers = torch.zeros(sum(lengths), dtype=torch.int64)
    dist.broadcast(numbers, src=0, group=control)
    *places, tables, rows_N, state_slots_S, state_ends_T, _, image_rows_M, last_seen_T, rotary = torch.split(
        numbers.to(device), lengths
    )
    adapters_T = torch.split(numbers, lengths)[-4]  # stays on the host
    media = None
    if len(image_rows_M) or len(rotary):
        features_ME = torch.zeros(len(image_rows_M), width)
        if len(image_rows_M):
            dist.broadcast(features_ME, src=0, group=control)
        media = StepMedia(
            image_rows_M,
            features_ME.to(device),
            last_seen_T if len(last_seen_T) else None,
            rotary.view(3, -1) if len(rotary) else None,
        )
    num_sequences = len(places[-1])
    inputs = step_inputs(
        [*places, tables.view(num_sequences, -1), *(one for one in (state_slots_S, state_ends_T) if len(one))],
        query_len=query_len,
        adapters_T=adapters_T if len(adapters_T) else None,
        media=media,
        longest=longest,
    )
    return inputs, rows_N if kind == PREFILL else None
