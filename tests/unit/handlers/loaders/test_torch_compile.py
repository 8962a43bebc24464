from __future__ import annotations

import itertools
import logging
import time

import pytest
import torch

from flambeau.handlers.base import BaseHandler
from flambeau.handlers.loaders.torch_compile import CompiledCall, compile_lock, compile_model, read_pt2
from flambeau.torchserve.handlers.mock_context import MockContext
from support.log_records import logged
from support.models.net import Net

LOGGER = "flambeau.handlers.loaders.torch_compile"
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's, at its own older parts


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # else it would be set here, for all that follows


@pytest.mark.parametrize(
    ("section", "options"),
    [
        (None, None),
        ("inductor", {"backend": "inductor"}),
        ({"backend": "inductor", "mode": "reduce-overhead"}, {"backend": "inductor", "mode": "reduce-overhead"}),
        ({"compile": {"enable": True, "backend": "eager", "dynamic": False}}, {"backend": "eager", "dynamic": False}),
        ({"compile": {"enable": True}}, {}),
        ({"compile": {"enable": False, "backend": "eager"}}, None),
        ({"export": {"aot_compile": True}}, None),
        ("compile", {"backend": "compile"}),  # a text is always a backend, whatever it contains
    ],
)
def test_forms_of_the_pt2_section(section, options):
    assert read_pt2(section) == options


@pytest.mark.parametrize(
    ("section", "words"),
    [([1], "pt2 should be str or dict"), ({"compile": {"backend": "eager"}}, "needs `enable: true`")],
)
def test_forms_that_are_wrong(section, words):
    with pytest.raises(ValueError, match=words):
        read_pt2(section)


@pytest.mark.parametrize(("section", "is_compiled"), [({"enable": True}, True), ({"enable": False}, False)])
def test_a_model_is_compiled_with_defaults_if_nothing_but_enable_is_given(section, is_compiled, tmp_path, caplog):
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self): super().__init__(1, 1)\n"
    )
    context = MockContext(model_pt_file=None, model_dir=str(tmp_path), model_file="net.py")
    context.model_yaml_config = {"pt2": {"compile": section}}
    handler = BaseHandler()
    with caplog.at_level(logging.INFO, LOGGER):
        handler.initialize(context)
    assert isinstance(handler.model, torch._dynamo.OptimizedModule) is is_compiled
    assert ("Compiled model with the defaults of torch.compile" in caplog.text) is is_compiled


def test_unknown_backend_leaves_the_model_unchanged(caplog):
    model = torch.nn.Linear(2, 2)
    assert compile_model(model, {"backend": "nonsense"}) is model
    assert model._compiled_call_impl is None
    assert logged(caplog, LOGGER) == [("nonsense", "torch.compiler.list_backends() has those of this machine")]


def test_unknown_option_leaves_the_model_unchanged(caplog):
    model = torch.nn.Linear(2, 2)
    compile_model(model, {"backend": "eager", "speed": 11})
    [(error,)] = logged(caplog, LOGGER)
    assert "speed" in str(error)  # in the words of torch
    assert model(torch.zeros(1, 2)).shape == (1, 2)


def test_failing_compiler_falls_back_with_its_reason(caplog):
    def broken(graph, inputs):
        raise NotImplementedError("no silicon today")

    torch._dynamo.reset()
    torch._dynamo.register_backend(broken, name="broken_for_tests")
    model = Net()
    expected = model(torch.ones(3, 4))
    compiled = compile_model(model, {"backend": "broken_for_tests"})
    assert torch.equal(compiled(torch.ones(3, 4)), expected)
    assert torch.equal(compiled(torch.ones(3, 4)), expected)
    [(_, reason)] = logged(caplog, LOGGER)  # once: the second call is eager
    assert "no silicon today" in reason


def test_compiled_model_is_torchs_module_with_the_attributes_of_the_model():
    torch._dynamo.reset()
    model = Net().eval()
    model.labels = ["a", "b"]
    compiled = compile_model(model, {"backend": "eager"})
    assert type(compiled) is torch._dynamo.OptimizedModule
    assert compiled.labels == ["a", "b"]
    assert not compiled.training
    assert torch.equal(compiled(torch.ones(3, 4)), model(torch.ones(3, 4)))


def test_one_compilation_serves_all_batch_sizes_above_one():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = compile_model(Net().eval(), {"backend": "eager"})
    with torch.inference_mode():
        for size in (1, 4, 2, 3, 8, 5, 1, 64):
            assert model(torch.zeros(size, 4)).shape == (size, 3)
    assert counters["stats"]["unique_graphs"] == 2


def test_bad_input_is_not_taken_for_a_failed_compilation(caplog):
    torch._dynamo.reset()
    model = compile_model(Net().eval(), {"backend": "eager"})
    model(torch.zeros(2, 4))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.zeros(2, 5))
    assert type(model.forward) is CompiledCall
    assert not logged(caplog, LOGGER)


def test_compilation_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        compile_model(torch.nn.Linear(2, 2), {"backend": "inductor", "mode": "reduce-overhead"})
    assert logged(caplog, LOGGER, "INFO") == [("backend inductor, mode reduce-overhead",)]


def test_one_worker_compiles_at_a_time(tmp_path):
    import threading

    times = []

    def compile_something():
        with compile_lock(tmp_path):
            began = time.monotonic()
            time.sleep(0.05)
            times.append((began, time.monotonic()))

    threads = [threading.Thread(target=compile_something) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times.sort()
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(times))


def test_folder_without_locks_does_not_block(tmp_path):
    with compile_lock(tmp_path / "missing"), compile_lock(None):
        pass


def test_wait_for_the_lock_has_a_timeout(tmp_path):
    began = time.monotonic()
    with compile_lock(tmp_path), compile_lock(tmp_path, timeout_s=0.2):
        assert 0.2 <= time.monotonic() - began < 60
