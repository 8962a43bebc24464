"""Warm-up, torch.compile, and the measurements a handler takes of itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from flambeau.archive.pack import Recipe, pack
from support.archives import pack_handler
from support.load_archives import outcome_of
from support.models.net import Net
from support.running import RunningServer

NET = Path(__file__).parents[1] / "support" / "models" / "net.py"
ROW = [0.5, -1.0, 2.0, 0.25]
ONE_WORKER = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 100\n"


UNCOMPILED = {
    "hasty": ("pt2: fastest", "there is no backend 'fastest'"),
    "speedy": ("pt2:\n  compile: {enable: true, backend: eager, speed: 11}", "speed"),
}
NONSENSE = {
    "float8": ("dtype: float8\nmaxRetryTimeoutInSec: 1", "float8 is not known"),
    "seven": ("pt2: 7\nmaxRetryTimeoutInSec: 1", "pt2 should be str or dict"),
}
NO_EXAMPLE = {
    "number": ("warmup: 5", "the warmup section"),
    "gone": ("warmup: {file: gone.jpg}", "gone.jpg cannot be read"),
    "none": ("warmup: {body: [1.0], batch_sizes: [0]}", "whole numbers from 1 on"),
}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


def pack_net(folder: Path, config: str, name: str = "net") -> Path:
    """Pack the network with a model-config."""
    torch.manual_seed(0)
    torch.save(Net().state_dict(), folder / "net.pth")
    (folder / "model-config.yaml").write_text(ONE_WORKER + config)
    recipe = Recipe(
        model_name=name,
        handler="base_handler",
        model_file=NET,
        serialized_file=folder / "net.pth",
        config_file=folder / "model-config.yaml",
    )
    return pack(recipe, folder, force=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server with a model for each setting: what takes time is torch, which each of them loads."""
    folder, log = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("log") / "server.log"
    settings = {"brief": "dtype: bfloat16\nhandler:\n  profile: true\n", "float8": NONSENSE["float8"][0]}
    settings |= {name: config for name, (config, _) in UNCOMPILED.items()}
    models = [pack_net(folder, config, name) for name, config in settings.items()]
    models += [pack_handler(folder, "echo", name=name, config=config) for name, (config, _) in NO_EXAMPLE.items()]
    running = RunningServer(log, *map(str, models))
    running.start_timeout_s = 120
    try:
        yield running.wait_started()
    finally:
        running.stop(timeout=40)


def answers(server, net, model="net"):
    with torch.inference_mode():
        expected = net(torch.tensor([ROW]))[0].tolist()
    for future in server.at_once(lambda body: server.predict(model, body), [ROW] * 7):
        assert future.result().json == pytest.approx(expected, rel=1e-4)


def num_libraries(folder: Path) -> int:
    return len([*(folder / "cache" / "flambeau" / "inductor").rglob("*.so")])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_model_answers_the_same_and_the_next_start_finds_its_code(start, net, tmp_path):
    archive = pack_net(tmp_path, f"pt2:\n  compile:\n    enable: true\n    backend: inductor\nwarmup:\n  body: {ROW}\n")
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TORCHINDUCTOR_CACHE_DIR": ""}
    first = start(archive, env=env)
    first.until(lambda: first._connects() and first.request("GET", "/readyz").status == 200, timeout=150)
    assert "Compiled model with backend inductor" in first.log
    answers(first, net)
    assert first.log.count("compiled for inputs like") <= 2  # one for a single row, one for all other batches
    first.stop()
    num_compiled = num_libraries(tmp_path)
    assert num_compiled
    second = start(archive, env=env)
    second.until(lambda: second._connects() and second.request("GET", "/readyz").status == 200, timeout=150)
    answers(second, net)
    assert num_libraries(tmp_path) == num_compiled, "the second server has compiled something"


def test_profiler_writes_a_trace_and_a_table(start, tmp_path):
    shutil.rmtree("/tmp/pytorch_profiler/profiled", ignore_errors=True)  # what an earlier run has left
    server = start(pack_net(tmp_path, "", name="profiled"), env={"ENABLE_TORCH_PROFILER": "TRUE"}).wait_ready()
    assert server.predict("profiled", ROW).status == 200
    server.until(lambda: "Self CPU time total" in server.log)  # the table has the ten longest rows
    [trace] = Path("/tmp/pytorch_profiler/profiled").glob("*.json")
    text = trace.read_text()
    assert all(f'"{stage}"' in text for stage in ("preprocess", "inference", "postprocess"))
    assert server.manage("GET", "/models/profiled?customized=true").status == 200


def test_handler_that_cannot_answer_its_example_is_not_served(start, tmp_path):
    server = start(pack_handler(tmp_path, "faulty", config="warmup:\n  body: {do: raise}\n")).wait_started()
    assert "warm-up" in server.failure("faulty")
    assert server.request("GET", "/readyz").status == 503


@pytest.mark.parametrize("name", UNCOMPILED)
def test_model_that_cannot_be_compiled_is_served_as_it_is(server, net, name):
    answers(server, net, name)
    assert server.logged(UNCOMPILED[name][1])


@pytest.mark.parametrize("name", NO_EXAMPLE)
def test_examples_that_make_no_sense_are_named(server, name):
    assert NO_EXAMPLE[name][1] in server.failure(name)


@pytest.mark.parametrize("name", NONSENSE)
def test_settings_that_make_no_sense_are_named(tmp_path, name):
    config, words = NONSENSE[name]
    assert words in outcome_of(pack_net(tmp_path, config, name), [])["failure"]


def test_request_to_a_model_that_cannot_be_loaded_fails_with_the_cause_at_once(server):
    reply = server.predict("float8", ROW)
    assert reply.status == 503
    assert "float8 is not known" in reply.message
    assert "retry-after" not in reply.headers  # the next try would end the same


def test_dtype_of_the_model_config_is_used(server, net):
    with torch.inference_mode():
        exact = net(torch.tensor([ROW]))[0].tolist()
        expected = net.to(torch.bfloat16)(torch.tensor([ROW], dtype=torch.bfloat16))[0].tolist()
    answer = server.predict("brief", ROW).json
    assert answer == pytest.approx(expected)
    assert answer != pytest.approx(exact, rel=1e-6)


def test_times_of_the_stages_are_metrics_when_asked_for(server):
    server.predict("brief", ROW)
    server.until(
        lambda: "ts_handler_inference" in server.request("GET", "/metrics", port=server.metrics_port).body.decode()
    )
    metrics = server.request("GET", "/metrics", port=server.metrics_port).body.decode()
    assert all(f"ts_handler_{stage}" in metrics for stage in ("preprocess", "inference", "postprocess"))
    assert "HandlerTime" in metrics
