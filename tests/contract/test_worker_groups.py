"""Workers that are groups of processes: every rank loads the model, and they answer as one."""

from __future__ import annotations

import json
import os
import signal

import pytest

from support.archives import pack_handler
from support.running import RunningServer

TP = """
parallelType: tp
deviceType: cpu
minWorkers: 1
maxWorkers: 1
torchrun:
    nproc-per-node: 2
    OMP_NUMBER_THREADS: 1
"""
X = [1.0, 2.0, 3.0, 4.0]
PRODUCT = [80.0, 90.0, 100.0, 110.0]
LOADS_S = 90  # two processes import torch and meet, on a machine that does other things too


def pids_of(server, model):
    worker = server.describe(model)["workers"][0]
    return [rank["pid"] for rank in worker["ranks"]] if worker["status"] == "READY" else []


def pack_model(folder, handler, config=TP):
    return pack_handler(folder, handler, name="tensor_parallel", config=config)


def serve(start, model, **options):
    server = start(model, **options)
    server.start_timeout_s = LOADS_S
    return server


def share(tmp_path_factory, handler, config=TP):
    """A server for several tests: what one of them breaks comes back by itself."""
    folder = tmp_path_factory.mktemp("shared")
    server = RunningServer(folder / "server.log", str(pack_model(folder, handler, config)))
    server.start_timeout_s = LOADS_S
    try:
        yield server.wait_ready()
    finally:
        server.stop(timeout=40)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Ranks that meet through torch.distributed."""
    yield from share(tmp_path_factory, "tensor_parallel")


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """Ranks that do not import torch, which takes most of the time of a start."""
    yield from share(tmp_path_factory, "summing_ranks")


@pytest.fixture(scope="module")
def batching(tmp_path_factory):
    yield from share(tmp_path_factory, "summing_ranks", TP + "responseTimeout: 60\nbatchSize: 4\nmaxBatchDelay: 200\n")


def product(server, **order):
    return server.predict("tensor_parallel", {"x": X, **order}, timeout=LOADS_S)


def test_ranks_compute_one_answer_together(shared):
    reply = product(shared)
    assert (reply.status, reply.json["product"]) == (200, PRODUCT)
    described = shared.describe("tensor_parallel")
    assert (described["parallelType"], described["parallelLevel"], described["deviceType"]) == ("tp", 2, "cpu")
    [worker] = described["workers"]
    assert int(worker["id"]) >= 29500
    assert [rank["rank"] for rank in worker["ranks"]] == [0, 1]
    assert worker["pid"] == worker["ranks"][0]["pid"] == reply.json["pid"]
    assert worker["memoryUsage"] > worker["ranks"][1]["memoryUsage"] > 1 << 20


def test_ranks_have_the_variables_of_torchrun(shared):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "LOGLEVEL"]
    told = shared.predict("tensor_parallel", {"variables": [*names, "MASTER_PORT"]}).json
    assert [told[name] for name in names] == ["0", "0", "2", "2", "127.0.0.1", "1", "INFO"]
    assert int(told["MASTER_PORT"]) >= 29500


def test_only_rank_0_sends_chunks(shared):
    reply = product(shared, streams=True)
    assert reply.headers["transfer-encoding"] == "chunked"
    head, _, rest = reply.text.partition(";")
    assert head == "first"
    assert json.loads(rest)["product"] == PRODUCT


def test_many_requests_at_a_time_are_never_mixed_up(shared):
    scales = [float(i) for i in range(12)]
    replies = shared.at_once(lambda s: product(shared, x=[s * x for x in X]), scales)
    assert [reply.result().json["product"] for reply in replies] == [[s * p for p in PRODUCT] for s in scales]


def test_request_that_every_rank_refuses_fails_alone(shared):
    pids = pids_of(shared, "tensor_parallel")
    reply = shared.predict("tensor_parallel", {"y": X})
    assert reply.status == 503
    assert product(shared).json["product"] == PRODUCT
    assert pids_of(shared, "tensor_parallel") == pids


def test_client_that_goes_away_leaves_the_ranks_in_step(shared):
    with pytest.raises(TimeoutError):
        shared.predict("tensor_parallel", {"x": X, "sleep_s": 1.0}, timeout=0.3)
    assert product(shared).json["product"] == PRODUCT


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_is_killed_ends_its_group_which_is_restarted_as_one(light, rank):
    before = light.until(lambda: pids_of(light, "tensor_parallel"))
    os.kill(before[rank], signal.SIGKILL)
    after = light.until(lambda: (pids := pids_of(light, "tensor_parallel")) and not set(pids) & set(before) and pids)
    assert len(after) == 2
    assert product(light).json["product"] == PRODUCT
    assert f"rank {rank}: killed by SIGKILL" in light.describe("tensor_parallel")["workers"][0]["lastFailure"]["reason"]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before)


def test_rank_that_exits_in_the_middle_of_a_request_is_named(shared):
    reply = product(shared, rank=1, accident="exit")
    assert (reply.status, reply.message.startswith("Worker died: ")) == (500, True)
    assert "rank 1: exited with code 3" in reply.cause
    assert product(shared).json["product"] == PRODUCT


def test_batches_are_computed_together(batching):
    scales = [1.0, 2.0, 3.0, 4.0]
    replies = batching.at_once(lambda s: product(batching, x=[s * x for x in X]), scales)
    assert [reply.result().json["product"] for reply in replies] == [[s * p for p in PRODUCT] for s in scales]


def test_ranks_that_part_ways_are_restarted_before_they_mix_up_requests(batching):
    reply = product(batching, rank=0, accident="raise")  # rank 1 waits for it in the collective
    assert reply.status == 500
    assert "out of step" in reply.cause
    assert product(batching, x=[2.0, 4.0, 6.0, 8.0]).json["product"] == [160.0, 180.0, 200.0, 220.0]


def test_rank_that_cannot_load_is_named(start, tmp_path):
    model = pack_model(tmp_path, "summing_ranks")
    server = serve(start, model, env={"LOAD_FAILS_ON_RANK": "1"}).wait_started()
    failure = server.describe("tensor_parallel")["workers"][0]["lastFailure"]
    assert failure["reason"].startswith("rank 1: the model could not be loaded: ValueError: this rank has no weights")


def test_pipeline_parallel_model_is_asked_at_rank_0_only(start, tmp_path):
    server = serve(start, pack_handler(tmp_path, "led", config=TP.replace("tp", "pp"))).wait_ready()
    assert [server.predict("led", {}).json for _ in range(3)] == [{"rank": "0", "calls": n} for n in (1, 2, 3)]
    pids = pids_of(server, "led")
    assert server.manage("PUT", "/models/led?min_worker=0").status == 202
    server.until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert server.describe("led")["workers"] == []


def test_groups_grow_as_workers_do_and_are_stopped_gracefully_with_what_they_have_accepted(light):
    """The last of the tests that share the server: it removes the model."""
    grown = light.manage("PUT", "/models/tensor_parallel?min_worker=2&synchronous=true", timeout=LOADS_S)
    assert grown.status == 200
    workers = light.describe("tensor_parallel")["workers"]
    assert int(workers[1]["id"]) >= int(workers[0]["id"]) + 2  # each rank has a number of its own
    pids = {rank["pid"] for worker in workers for rank in worker["ranks"]}
    assert len(pids) == 4
    replies = light.at_once(lambda s: product(light, sleep_s=s), [0.5] * 6)
    light.until(lambda: light.describe("tensor_parallel")["jobQueueStatus"]["pendingRequests"])
    assert light.manage("DELETE", "/models/tensor_parallel", timeout=LOADS_S).status == 200
    answered = [reply.result() for reply in replies]
    accepted = [reply for reply in answered if reply.status != 404]  # some may have come after the removal
    assert len(accepted) > 2
    assert [reply.json["product"] for reply in accepted] == [PRODUCT] * len(accepted)
    assert {reply.json["pid"] for reply in accepted} == {worker["pid"] for worker in workers}
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A server with two devices and no model yet; and its store."""
    folder = tmp_path_factory.mktemp("empty")
    store = folder / "store"
    store.mkdir()
    devices = {"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}
    server = RunningServer(folder / "server.log", "--model-store", str(store), env=devices)
    try:
        yield server.wait_ready(), store
    finally:
        server.stop(timeout=40)


def test_several_nodes_are_refused_with_a_remedy(empty):
    server, store = empty
    pack_handler(store, "led", name="far", config=TP + "    nnodes: 2\n")
    reply = server.manage("POST", "/models?url=far.mar&initial_workers=1")
    assert reply.status == 400
    assert "set nnodes: 1" in reply.message


def test_group_that_needs_more_devices_than_there_are_is_refused(empty):
    server, store = empty
    pack_handler(store, "led", config="parallelType: tp\ndeviceType: gpu\ntorchrun:\n    nproc-per-node: 4\n")
    reply = server.manage("POST", "/models?url=led.mar&initial_workers=1")
    assert (reply.status, reply.json["type"]) == (500, "WorkerInitializationException")
    assert reply.message == "No enough gpu devices for model:led parallelLevel:4"
    assert server.manage("GET", "/models/led").status == 404


def test_groups_get_their_own_devices_and_no_more_workers_than_there_are_groups(start, tmp_path):
    config = "parallelType: custom\nparallelLevel: 2\ndeviceType: gpu\nminWorkers: 1\nmaxWorkers: 1\n"
    model = pack_handler(tmp_path, "names", config=config)
    server = start(model, env={"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb,MIG-cc,GPU-dd,GPU-ee"}).wait_ready()
    assert server.manage("PUT", "/models/names?min_worker=9&max_worker=9&synchronous=true").status == 200
    described = server.describe("names")
    assert (described["minWorkers"], described["maxWorkers"], len(described["workers"])) == (2, 2, 2)
    visible = []
    for worker in described["workers"]:
        with open(f"/proc/{worker['pid']}/environ") as file:
            visible += [word.partition("=")[2] for word in file.read().split("\0") if word.startswith("CUDA_VISIBLE")]
    assert visible == ["GPU-aa,GPU-bb", "MIG-cc,GPU-dd"]


def test_group_that_does_not_answer_in_time_is_ended_whole(start, tmp_path):
    model = pack_model(tmp_path, "summing_ranks", TP + "responseTimeout: 2\n")
    server = serve(start, model).wait_ready()
    before = pids_of(server, "tensor_parallel")
    reply = product(server, rank=1, accident="raise")  # rank 0 waits for it in the collective
    assert reply.status == 500
    assert "responseTimeout" in reply.cause
    assert product(server).json["product"] == PRODUCT
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before)


def test_server_that_stops_while_a_group_loads_leaves_no_process(start, tmp_path):
    server = serve(start, pack_model(tmp_path, "tensor_parallel")).wait_listening()

    def pids():
        reply = server.manage("GET", "/models/tensor_parallel")
        workers = reply.json[0]["workers"] if reply.status == 200 else []
        found = [rank["pid"] for worker in workers for rank in worker.get("ranks", [])]
        return found if len(found) == 2 and min(found) > 0 else []

    ranks = server.until(pids)
    server.stop()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)
