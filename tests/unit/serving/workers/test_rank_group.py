"""What the server hears of a worker of several processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flambeau.serving.events import ServerEvents
from flambeau.serving.workers.rank_group import RankGroup
from flambeau.serving.workers.worker_process import WorkerSpec
from flambeau.wire.messages import Load, Ready

LOAD = Load("m", "1.0", "/", "h.py", 1, None, True, True, 1)


def new_group(told, *, keeps_step):
    other = WorkerSpec(id=2, load=LOAD, environment={}, max_frame_bytes=1)
    spec = WorkerSpec(id=1, load=LOAD, environment={}, max_frame_bytes=1, others=(other,), keeps_step=keeps_step)
    output = SimpleNamespace(of_rank=lambda rank: None)
    return RankGroup(spec, told.extend, lambda fault: None, output, ServerEvents())


@pytest.mark.parametrize(
    ("keeps_step", "heard"),
    [
        (False, Ready(True, True, 2, True)),  # rank 0 leads the others itself, so it is as rank 0 says
        (True, Ready(can_share_memory=False)),
    ],
)
def test_group_is_ready_when_its_last_rank_is(keeps_step, heard):
    told = []
    group = new_group(told, keeps_step=keeps_step)
    group._receive(0, [Ready(True, True, 2, True)])
    assert told == []
    group._receive(1, [Ready()])
    assert told == [heard]
