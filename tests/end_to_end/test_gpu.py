"""The same files on a GPU: placed there without a word in the handler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flambeau.archive.pack import Recipe, pack
from support.models.net import Net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NET = Path(__file__).parents[1] / "support" / "models" / "net.py"
WHERE = """
from flambeau.handlers.base import BaseHandler

class Where(BaseHandler):
    def postprocess(self, data):
        return [{"row": row, "device": str(data.device)} for row in data.tolist()]
"""
ROWS = [[0.5, -1.0, 2.0, 0.25], [1.0, 1.0, 1.0, 1.0], [-3.5, 0.125, 0.0, 2.0]]
ONE_WORKER = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 50\n"
ANY_BATCH = ({0: torch.export.Dim("batch", min=1, max=64)},)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


def save(net, kind, path):
    if kind == "state_dict":
        torch.save(net.state_dict(), path)
    elif kind == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(net.state_dict(), path)
    elif kind == "torchscript":
        torch.jit.trace(net, torch.zeros(2, 4)).save(path)
    elif kind == "exported":
        torch.export.save(torch.export.export(net, (torch.zeros(2, 4),), dynamic_shapes=ANY_BATCH), path)
    else:
        gpu = Net().eval().cuda()
        gpu.load_state_dict(net.state_dict())
        program = torch.export.export(gpu, (torch.zeros(2, 4, device="cuda"),), dynamic_shapes=ANY_BATCH)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        plain = f"import torch; torch._inductor.aoti_load_package({str(path)!r})"
        if code := subprocess.run([sys.executable, "-c", plain], capture_output=True, check=False).returncode:
            pytest.skip(f"torch {torch.__version__} cannot load its own package on this machine (exit status {code})")


SUFFIXES = {
    "state_dict": "pth",
    "safetensors": "safetensors",
    "torchscript": "pt",
    "exported": "pt2",
    "package": "pt2",
}


def serve(start, net, kind, tmp_path, config=""):
    file = tmp_path / f"net.{SUFFIXES[kind]}"
    save(net, kind, file)
    (tmp_path / "where.py").write_text(WHERE)
    (tmp_path / "model-config.yaml").write_text(ONE_WORKER + config)
    recipe = Recipe(
        model_name="net",
        handler=str(tmp_path / "where.py"),
        model_file=NET if kind in ("state_dict", "safetensors") else None,
        serialized_file=file,
        config_file=tmp_path / "model-config.yaml",
    )
    server = start(pack(recipe, tmp_path, force=True))
    server.until(lambda: server._connects() and server.request("GET", "/readyz").status == 200, timeout=200)
    return server


def check(server, net, device, tolerance=1e-3):
    with torch.inference_mode():
        expected = net(torch.tensor(ROWS)).tolist()
    futures = server.at_once(lambda body: server.predict("net", body), ROWS)
    for future, row in zip(futures, expected, strict=True):
        answer = future.result().json
        assert answer["device"] == device
        assert answer["row"] == pytest.approx(row, rel=tolerance, abs=tolerance)


@pytest.mark.filterwarnings("ignore")  # torch's, about its own older formats
@pytest.mark.parametrize("kind", SUFFIXES)
def test_model_is_on_the_gpu(start, net, tmp_path, kind):
    check(serve(start, net, kind, tmp_path), net, "cuda:0")


def test_device_type_cpu_keeps_it_off_the_gpu(start, net, tmp_path):
    check(serve(start, net, "state_dict", tmp_path, "deviceType: cpu\n"), net, "cpu")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_for_the_gpu(start, net, tmp_path, mode):
    config = f"pt2: {{backend: inductor, mode: {mode}}}\nwarmup: {{body: {ROWS[0]}}}\n"
    server = serve(start, net, "state_dict", tmp_path, config)
    assert "Compiled model with backend inductor" in server.log
    assert not server.logged("inductor", level="WARNING")
    for _ in range(3):
        check(server, net, "cuda:0")


def test_half_precision_and_workers_that_share_the_device(start, net, tmp_path):
    config = "dtype: bfloat16\n"
    server = serve(start, net, "safetensors", tmp_path, config)
    assert server.manage("PUT", "/models/net?min_worker=3&synchronous=true", timeout=100).status == 200
    check(server, net, "cuda:0", tolerance=5e-2)
    assert {worker["gpu"] for worker in server.describe("net")["workers"]} == {True}


def test_bad_shape_is_the_clients_fault_there_too(start, net, tmp_path):
    server = serve(start, net, "state_dict", tmp_path)
    reply = server.predict("net", [1.0, 2.0])
    assert reply.status == 400
    assert "shape" in reply.message
    check(server, net, "cuda:0")
