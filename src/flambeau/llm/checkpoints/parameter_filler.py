"""fill: the tensors of files → the parameters of a network, one by one, or by threads on the way to a GPU."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flambeau.llm.checkpoints.loading_progress import Progress
from flambeau.llm.checkpoints.parameter_map import Placement, as_is
from flambeau.llm.checkpoints.staged_copies import StagedCopies
from flambeau.llm.checkpoints.weight_files import SafetensorsFile
from flambeau.llm.errors import CheckpointError
from flambeau.llm.mapped_files import release_weight_files

TENSORS_AHEAD = 16  # of the one that the loader waits for, while threads copy to a GPU
RELEASE_BYTES = 1 << 28  # read between two releases of mapped files …
SMALL_BYTES = 1 << 30  # … which take a moment, and of smaller checkpoints come after the last tensor

Arrived = Callable[[str, nn.Module], nn.Module | None]


def fill(
    model: nn.Module,
    placements: list[Placement],
    device: torch.device,
    progress: Progress | None,
    arrived: Arrived | None,
) -> None:
    """Copy every tensor to its parameter."""
    if arrived is not None:
        placements = largest_first(placements)
    total_bytes, done_bytes = sum(placement.num_bytes for placement in placements), 0
    missing, released_bytes = Counter(placement.owner for placement in placements), 0
    place_all = place_by_threads if device.type == "cuda" else place_one_by_one
    for placement in place_all(model, placements, device):
        missing[placement.owner] -= 1
        if arrived is not None and not missing[placement.owner]:
            replace_module(model, placement.owner, arrived)
        done_bytes += placement.num_bytes
        is_due = total_bytes > SMALL_BYTES and done_bytes - released_bytes >= RELEASE_BYTES
        if arrived is not None and is_due:
            release_weight_files()  # most of what was read has been replaced
            released_bytes = done_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)


def largest_first(placements: list[Placement]) -> list[Placement]:
    """The placements by the size of their module, else in their order.

    What is made of a module on the way is as large as the module: for the largest, there is little else in memory then.
    """
    sizes = Counter[str]()
    for placement in placements:
        sizes[placement.owner] += placement.num_bytes
    return sorted(placements, key=lambda placement: -sizes[placement.owner])


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread meanwhile."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def place_one_by_one(model: nn.Module, placements: list[Placement], device: torch.device) -> Iterator[Placement]:
    """Fill the parameters; a placement is yielded when it is done."""
    for placement in placements:
        with one_thread():  # the file is the limit, and threads that wait for each other are slow on a busy machine
            place(model.get_submodule(placement.owner), placement, device)
        yield placement


def place_by_threads(model: nn.Module, placements: list[Placement], device: torch.device) -> Iterator[Placement]:
    """The same, in the same order, but threads copy tensors that need no change to the device."""
    waiting: deque[tuple[Placement, Future[None] | None]] = deque()
    with StagedCopies(device) as copies:
        for placement in placements:
            waiting.append((placement, start_copy(model, placement, device, copies)))
            if len(waiting) > TENSORS_AHEAD:
                yield finished(*waiting.popleft())
        while waiting:
            yield finished(*waiting.popleft())


def finished(placement: Placement, copied: Future[None] | None) -> Placement:
    """Wait for a copy."""
    try:
        if copied is not None:
            copied.result()
    except OSError as error:
        raise CheckpointError(str(error)) from error
    return placement


def start_copy(
    model: nn.Module, placement: Placement, device: torch.device, copies: StagedCopies
) -> Future[None] | None:
    """Allocate a parameter, if it is not there, and start to fill it or a part of it; None: it is filled."""
    module, leaf = model.get_submodule(placement.owner), placement.parameter.rpartition(".")[2]
    target: Tensor = getattr(module, leaf)
    stored = placement.stored
    if placement.cut is not as_is or stored.dtype != target.dtype or not isinstance(stored.file, SafetensorsFile):
        place(module, placement, device)
        return None
    value = torch.empty(target.shape, dtype=target.dtype, device=device) if target.is_meta else target.detach()
    part = value[placement.region] if placement.region else value
    if not part.is_contiguous() or not part.nbytes:
        place(module, placement, device)
        return None
    set_parameter(module, leaf, value)
    return copies.start(stored.file.path, stored.file.offset(stored.name), part)


def place(module: nn.Module, placement: Placement, device: torch.device) -> None:
    """Fill a parameter or a part of it; the first part allocates it."""
    leaf = placement.parameter.rpartition(".")[2]
    target: Tensor = getattr(module, leaf)
    tensor = placement.cut(placement.stored.read())
    if not placement.region:
        value = tensor.to(device, target.dtype).contiguous()
    else:
        is_empty = target.is_meta
        value = torch.empty(target.shape, dtype=target.dtype, device=device) if is_empty else target.detach()
        value[placement.region].copy_(tensor)
    set_parameter(module, leaf, value)


def set_parameter(module: nn.Module, leaf: str, value: Tensor) -> None:
    """Replace a parameter, or a buffer."""
    is_parameter = isinstance(getattr(module, leaf), nn.Parameter)
    setattr(module, leaf, nn.Parameter(value, requires_grad=False) if is_parameter else value)


def replace_module(model: nn.Module, name: str, arrived: Arrived) -> None:
    """Replace a complete module if `arrived` returns another."""
    other = arrived(name, model.get_submodule(name))
    if other is not None:
        model.set_submodule(name, other)
