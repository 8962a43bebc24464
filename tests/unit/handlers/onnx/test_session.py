"""ONNX files → sessions."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flambeau.errors import HandlerError

np = pytest.importorskip("numpy")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from flambeau.handlers.onnx.session import choose_providers, open_session  # noqa: E402
from support.onnx_models import save_affine, save_sum_and_difference  # noqa: E402


def open_file(path):
    return open_session(path, use_cuda=False, threads=1)


def test_arrays_give_arrays_and_one_output_comes_bare(tmp_path):
    model = open_file(save_affine(tmp_path / "affine.onnx"))
    x = np.array([[1, 2, 3]], np.float32)
    result = model(x)
    assert isinstance(result, np.ndarray)
    assert result.tolist() == [[7, 13]]
    assert model(x=x).tolist() == [[7, 13]]


def test_tensors_give_tensors_and_several_outputs_a_tuple(tmp_path):
    torch = pytest.importorskip("torch")
    model = open_file(save_sum_and_difference(tmp_path / "two.onnx"))
    a, b = torch.tensor([[5.0, 6.0]], requires_grad=True), torch.tensor([[1.0, 2.0]])
    total, difference = model(a, b=b)
    assert isinstance(total, torch.Tensor)
    assert total.tolist() == [[6, 8]]
    assert difference.tolist() == [[4, 4]]


@pytest.mark.parametrize(
    ("arrays", "named", "reason"),
    [((1, 2, 3), {}, "3 inputs were given"), ((1,), {"a": 1}, "'a' is given twice"), ((), {"c": 1}, "'c' is unknown")],
)
def test_inputs_that_do_not_fit_are_named(tmp_path, arrays, named, reason):
    model = open_file(save_sum_and_difference(tmp_path / "two.onnx"))
    with pytest.raises(TypeError, match=reason):
        model(*arrays, **named)


def test_missing_and_corrupt_files_are_named(tmp_path):
    with pytest.raises(HandlerError, match=r"no absent\.onnx"):
        open_file(tmp_path / "absent.onnx")
    (tmp_path / "corrupt.onnx").write_bytes(b"\x00" * 100)
    with pytest.raises(HandlerError, match=r"corrupt\.onnx could not be loaded as ONNX"):
        open_file(tmp_path / "corrupt.onnx")


def test_gpu_is_used_if_requested_and_available(monkeypatch):
    import onnxruntime

    assert choose_providers(use_cuda=False, gpu_id=0) == ["CPUExecutionProvider"]
    names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)
    assert choose_providers(use_cuda=True, gpu_id=2) == [(names[0], {"device_id": 2}), names[1]]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names[1:])
    assert choose_providers(use_cuda=True, gpu_id=2) == names[1:]


def test_torch_is_not_loaded_for_arrays(tmp_path):
    path = save_affine(tmp_path / "affine.onnx")
    program = (
        "import sys, pathlib, numpy, flambeau.handlers.onnx.session as s\n"
        f"model = s.open_session(pathlib.Path({str(path)!r}), use_cuda=False, threads=1)\n"
        "model(numpy.zeros((1, 3), numpy.float32))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
