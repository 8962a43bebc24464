"""Warm-up, torch.compile, and the measurements a handler takes of itself."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from flambeau.archive.pack import Recipe, pack
from support.models.net import Net

NET = Path(__file__).parents[1] / "support" / "models" / "net.py"
ROW = [0.5, -1.0, 2.0, 0.25]
ONE_WORKER = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 100\n"


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def pack_net(tmp_path, net):
    """Pack the network with a model-config."""

    def pack_it(config: str, name: str = "net") -> Path:
        torch.save(net.state_dict(), tmp_path / "net.pth")
        (tmp_path / "model-config.yaml").write_text(ONE_WORKER + config)
        recipe = Recipe(
            model_name=name,
            handler="base_handler",
            model_file=NET,
            serialized_file=tmp_path / "net.pth",
            config_file=tmp_path / "model-config.yaml",
        )
        return pack(recipe, tmp_path, force=True)

    return pack_it


def answers(server, net):
    with torch.inference_mode():
        expected = net(torch.tensor([ROW]))[0].tolist()
    for future in server.at_once(lambda body: server.predict("net", body), [ROW] * 7):
        assert future.result().json == pytest.approx(expected, rel=1e-4)


def warm_up_s(server) -> float:
    [seconds] = re.findall(r"warmed up with batches of 1, 4 in ([\d.]+) s", server.log)
    return float(seconds)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_compiled_model_answers_the_same_and_the_next_start_finds_its_code(start, pack_net, net, tmp_path):
    archive = pack_net(f"pt2:\n  compile:\n    enable: true\n    backend: inductor\nwarmup:\n  body: {ROW}\n")
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TORCHINDUCTOR_CACHE_DIR": ""}
    first = start(archive, env=env)
    first.until(lambda: first._connects() and first.request("GET", "/readyz").status == 200, timeout=150)
    assert "Compiled model with backend inductor" in first.log
    answers(first, net)
    assert first.log.count("compiled for inputs like") <= 2  # one for a single row, one for all other batches
    first.stop()
    assert any((tmp_path / "cache" / "flambeau" / "inductor").rglob("*.so"))
    second = start(archive, env=env)
    second.until(lambda: second._connects() and second.request("GET", "/readyz").status == 200, timeout=60)
    answers(second, net)
    assert warm_up_s(second) < 0.5 * warm_up_s(first)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("pt2: fastest", "there is no backend 'fastest'"),
        ("pt2:\n  compile: {enable: true, backend: eager, speed: 11}", "speed"),
    ],
)
def test_model_that_cannot_be_compiled_is_served_as_it_is(start, pack_net, net, config, reason):
    server = start(pack_net(config)).wait_ready()
    answers(server, net)
    assert "the model is not compiled" in server.log
    assert reason in server.log


def test_handler_that_cannot_answer_its_example_is_not_served(start, pack_net):
    server = start(pack_net("warmup:\n  body: [1.0, 2.0]\n")).wait_started()
    assert "could not answer its own warm-up example" in server.log
    assert server.request("GET", "/readyz").status == 503


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("warmup: 5", "warmup is not understood"),
        ("warmup: {file: gone.jpg}", "gone.jpg cannot be read"),
        ("warmup: {body: [1.0], batch_sizes: [0]}", "whole numbers from 1 on"),
        ("dtype: float8", "float8 is not known"),
        ("pt2: 7", "pt2 should be str or dict"),
    ],
)
def test_settings_that_make_no_sense_are_named(start, pack_net, config, words):
    assert words in start(pack_net(config)).wait_started().log


def test_dtype_of_the_model_config_is_used(start, pack_net, net):
    server = start(pack_net("dtype: bfloat16")).wait_ready()
    with torch.inference_mode():
        exact = net(torch.tensor([ROW]))[0].tolist()
        expected = net.to(torch.bfloat16)(torch.tensor([ROW], dtype=torch.bfloat16))[0].tolist()
    answer = server.predict("net", ROW).json
    assert answer == pytest.approx(expected)
    assert answer != pytest.approx(exact, rel=1e-6)


def test_times_of_the_stages_are_metrics_when_asked_for(start, pack_net):
    server = start(pack_net("handler:\n  profile: true\n")).wait_ready()
    server.predict("net", ROW)
    server.until(
        lambda: "ts_handler_inference" in server.request("GET", "/metrics", port=server.metrics_port).body.decode()
    )
    metrics = server.request("GET", "/metrics", port=server.metrics_port).body.decode()
    assert all(f"ts_handler_{stage}" in metrics for stage in ("preprocess", "inference", "postprocess"))
    assert "HandlerTime" in metrics


def test_profiler_writes_a_trace_and_a_table(start, pack_net):
    shutil.rmtree("/tmp/pytorch_profiler/profiled", ignore_errors=True)  # what an earlier run has left
    server = start(pack_net("", name="profiled"), env={"ENABLE_TORCH_PROFILER": "TRUE"}).wait_ready()
    assert server.predict("profiled", ROW).status == 200
    server.until(lambda: "Self CPU time total" in server.log)
    assert all(stage in server.log for stage in ("preprocess", "inference", "postprocess"))
    assert [*Path("/tmp/pytorch_profiler/profiled").glob("*.json")]
    assert server.manage("GET", "/models/profiled?customized=true").status == 200


def test_request_to_a_model_that_cannot_be_loaded_is_told_why_at_once(start, pack_net):
    server = start(pack_net("dtype: float8")).wait_started()
    reply = server.predict("net", ROW, timeout=5)
    assert reply.status == 503
    assert "float8 is not known" in reply.message
    assert "retry-after" in reply.headers
