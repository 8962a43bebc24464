"""Devices of workers and of groups, on hosts with one, four and eight of them."""

from __future__ import annotations

from collections import Counter

import pytest

from flambeau.config.model import ModelConfig
from flambeau.errors import PlacementFailed
from flambeau.serving.workers import host_resources
from flambeau.serving.workers.device_allocator import (
    DeviceAllocator,
    candidates_of,
    next_device,
    next_devices,
    num_groups,
    threads_per_worker,
    visible_devices,
)
from flambeau.serving.workers.ranks import RendezvousPorts
from flambeau.serving.workers.worker_process import WorkerSpec
from flambeau.wire.messages import Load


def place(num_gpus, level, count, taken=()):
    used, groups = [*taken], []
    for _ in range(count):
        groups.append(next_devices(range(num_gpus), level, used))
        used += groups[-1]
    return groups


@pytest.mark.parametrize(
    ("num_gpus", "level", "expected"),
    [
        (1, 1, [(0,), (0,)]),
        (4, 2, [(0, 1), (2, 3), (0, 1)]),
        (4, 4, [(0, 1, 2, 3), (0, 1, 2, 3)]),
        (8, 2, [(0, 1), (2, 3), (4, 5), (6, 7), (0, 1)]),
        (8, 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (8, 3, [(0, 1, 2), (3, 4, 5), (0, 6, 7)]),
    ],
)
def test_groups_are_neighbors_and_fill_the_host(num_gpus, level, expected):
    assert [tuple(sorted(group)) for group in place(num_gpus, level, len(expected))] == expected


def test_group_goes_where_there_is_room_and_leaves_no_gap():
    assert place(8, 4, 1, taken=[0]) == [(4, 5, 6, 7)]
    assert place(4, 2, 1, taken=[0]) == [(2, 3)]
    assert place(8, 2, 1, taken=[0, 1, 4, 5, 6]) == [(2, 3)]


@pytest.mark.parametrize("num_gpus", [4, 8])
@pytest.mark.parametrize("level", [1, 2, 4])
def test_load_stays_even_however_many_groups_there_are(num_gpus, level):
    load = Counter(device for group in place(num_gpus, level, 2 * num_gpus) for device in group)
    assert max(load.values()) - min(load[device] for device in range(num_gpus)) <= 1


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_groups_share_nothing_while_there_are_devices_for_all(level):
    devices = [device for group in place(8, level, 8 // level) for device in group]
    assert len(set(devices)) == len(devices)


def test_groups_take_neighbors_of_the_devices_that_a_model_names():
    assert next_devices([6, 2, 4, 1], 2, []) == (6, 2)
    assert next_devices([6, 2, 4, 1], 2, [6, 2]) == (4, 1)


def test_more_devices_than_there_are():
    assert num_groups(8, 3, "m") == 2
    with pytest.raises(PlacementFailed, match=r"^No enough gpu devices for model:m parallelLevel:4$"):
        num_groups(2, 4, "m")


def test_worker_sees_its_devices_under_the_names_that_the_server_sees():
    assert visible_devices((2, 3), None) == "2,3"
    assert visible_devices((0, 2), "5, GPU-8a1b ,MIG-42") == "5,MIG-42"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "CUDA_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": "0"}, "HIP_VISIBLE_DEVICES"),
        ({"TS_IPEX_GPU_ENABLE": "true"}, "ZE_AFFINITY_MASK"),
        ({"TS_IPEX_GPU_ENABLE": "true", "CUDA_VISIBLE_DEVICES": "1"}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_variable_that_limits_devices_is_the_vendors(environment, expected, monkeypatch, tmp_path):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "TS_IPEX_GPU_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(host_resources, "NVIDIA_DRIVER", tmp_path / "none")
    monkeypatch.setattr(host_resources, "AMD_DRIVER", tmp_path / "none")
    assert host_resources.visibility_variable() == expected


def test_variable_on_amd(monkeypatch, tmp_path):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TS_IPEX_GPU_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host_resources, "NVIDIA_DRIVER", tmp_path / "none")
    monkeypatch.setattr(host_resources, "AMD_DRIVER", tmp_path)
    assert host_resources.visibility_variable() == "HIP_VISIBLE_DEVICES"


def new_grouping(num_gpus, **settings):
    config = ModelConfig(parallel_type="tp", **settings)
    return DeviceAllocator("m", config, range(num_gpus), list, RendezvousPorts(29500))


def test_parallel_model_has_no_more_workers_than_groups():
    grouping = new_grouping(8, parallel_level=3, min_workers=1, max_workers=9)
    assert (grouping.config.min_workers, grouping.config.max_workers) == (1, 2)
    assert new_grouping(0, parallel_level=3, min_workers=9, max_workers=9).config.max_workers == 9  # on the CPU
    assert grouping.take_id() == 29500
    assert grouping.take_id() == 29503
    with pytest.raises(PlacementFailed):
        new_grouping(8, parallel_level=4, device_ids=(0, 1))


def test_ids_that_do_not_exist_make_the_list_void():
    assert candidates_of(ModelConfig(device_ids=(0, 9)), range(4)) == range(4)
    assert candidates_of(ModelConfig(device_ids=(3, 1)), range(4)) == (3, 1)
    assert candidates_of(ModelConfig(device_type="cpu", device_ids=(3, 1)), range(4)) == ()


def test_each_rank_gets_its_number_and_the_devices_of_its_group(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    grouping = new_grouping(4, parallel_level=2)
    spec = grouping.apply(new_spec(grouping.gpu_id((2, 3))), (2, 3))
    ranks = [spec, *spec.others]
    assert [rank.id for rank in ranks] == [29500, 29501]
    assert [rank.load.gpu_id for rank in ranks] == [0, 1]
    assert [rank.environment["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["GPU-c,GPU-d"] * 2
    assert [rank.environment["RANK"] for rank in ranks] == ["0", "1"]
    assert len({rank.environment["MASTER_PORT"] for rank in ranks}) == 1
    assert spec.keeps_step


def new_spec(gpu_id):
    load = Load("m", "1.0", "/", "h", 1, gpu_id, True, True, 1000)
    return WorkerSpec(id=29500, load=load, environment={}, max_frame_bytes=1000)


def test_device_with_the_fewest_workers_comes_next():
    taken = []
    for _ in range(5):
        taken.append(next_device(range(3), taken))
    assert taken == [0, 1, 2, 0, 1]
    assert next_device([2, 0], []) == 2
    assert next_device([], []) is None


def test_workers_share_the_cores():
    assert threads_per_worker(8, 2) == 4
    assert threads_per_worker(2, 4) == 1
    assert threads_per_worker(4, 0) == 4
    assert threads_per_worker(8, 2, is_pipelined=True) == 3
    assert threads_per_worker(1, 1, is_pipelined=True) == 1


@pytest.mark.parametrize(
    ("options", "num_gpus", "words"),
    [
        ({"device_type": "gpu"}, 0, "deviceType is gpu, but the server found no GPU, so its workers run on the CPU"),
        ({"device_type": "gpu", "parallel_type": "tp", "parallel_level": 4}, 0, "run as 4 processes on the CPU"),
        ({"device_ids": (1,)}, 0, "deviceIds is [1], but the server found no GPU"),
        ({"device_ids": (0, 5)}, 2, "deviceIds has [5], but the GPUs are 0 to 1; all of them are used instead"),
        ({"device_ids": (0, 1, 2, 3)}, 4, "maxWorkers is 1 and each worker has a copy of the model on one GPU"),
        ({"device_type": "gpu"}, 1, None),
        ({"device_ids": (0, 1), "max_workers": 2}, 2, None),
        ({"device_ids": (0, 1), "parallel_type": "tp", "parallel_level": 2}, 2, None),
        ({"device_type": "cpu", "device_ids": (0, 1)}, 2, None),
        ({}, 0, None),
    ],
)
def test_devices_that_a_model_does_not_get_are_named_once(caplog, options, num_gpus, words):
    DeviceAllocator("m", ModelConfig(**options), range(num_gpus), lambda: (), RendezvousPorts(29500))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (words is not None)
    assert words is None or (words in texts[0] and texts[0].startswith("model m: "))
