from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from flambeau.errors import HandlerError
from flambeau.handlers.loaders.weights import load_eager, read_state_dict

NET = Path(__file__).parents[3] / "support" / "models" / "net.py"
CPU = torch.device("cpu")


class Evil:
    def __reduce__(self):
        return (print, ("this must not be printed",))


@pytest.fixture
def state():
    torch.manual_seed(0)
    hidden, out = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
    weights = {f"hidden.{k}": v for k, v in hidden.state_dict().items()}
    return weights | {f"out.{k}": v for k, v in out.state_dict().items()} | {"shift": torch.full((3,), 2.0)}


def is_mapped(tensor, file) -> bool:
    """Whether a tensor's memory is a page of that file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.endswith(str(file))
    return False


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_are_pages_of_the_file(tmp_path, state, suffix):
    file = tmp_path / f"net.{suffix}"
    if suffix == "pth":
        torch.save(state, file)
    else:
        pytest.importorskip("safetensors.torch").save_file(state, file)
    net = load_eager(NET, file, CPU).eval()
    assert all(is_mapped(tensor, file) for tensor in net.state_dict().values())
    assert torch.equal(net.out.weight, state["out.weight"])
    assert torch.equal(net.shift, state["shift"])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class Net: ...\n", "Net of net.py is no torch.nn.Module, so that it cannot take the weights in net.pth"),
        (
            "import torch\nclass Net(torch.nn.Module):\n    def __init__(self, width): ...\n",
            "Net of net.py cannot be created without arguments: missing a required argument: 'width'; it takes (width)",
        ),
        (
            "import torch\nclass Net(torch.nn.Module): ...\n",
            "net.pth does not fit the class Net of net.py: .* Pack the class that the weights were saved from",
        ),
    ],
)
def test_class_that_does_not_go_with_the_weights_is_refused(tmp_path, state, source, words):
    (tmp_path / "net.py").write_text(source)
    torch.save(state, tmp_path / "net.pth")
    with pytest.raises(HandlerError, match=words.replace("(", r"\(").replace(")", r"\)")):
        load_eager(tmp_path / "net.py", tmp_path / "net.pth", CPU)


def test_network_without_weights_is_noticed(caplog):
    load_eager(NET, None, CPU)
    assert "no file with weights, so that the network of net.py keeps those that its __init__ sets" in caplog.text


def test_constants_that_are_not_saved_are_there(tmp_path):
    file = tmp_path / "scaled.py"
    file.write_text(
        "import torch\n\nclass Scaled(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(2, 2)\n"
        "        self.register_buffer('scale', torch.zeros(3), persistent=False)\n"
        "        torch.nn.init.constant_(self.scale, 4.0)\n"
    )
    torch.save({"layer.weight": torch.ones(2, 2), "layer.bias": torch.ones(2)}, tmp_path / "scaled.pth")
    assert load_eager(file, tmp_path / "scaled.pth", CPU).scale.tolist() == [4.0, 4.0, 4.0]


def test_model_keeps_its_own_dtype(tmp_path, state):
    torch.save({name: value.double() for name, value in state.items()}, tmp_path / "net.pth")
    net = load_eager(NET, tmp_path / "net.pth", CPU)
    assert net.out.weight.dtype is torch.float32


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model_state_dict": state},
        lambda state: {f"module.{k}": v for k, v in state.items()},
        lambda state: {f"_orig_mod.{k}": v for k, v in state.items()},
    ],
)
def test_checkpoints_of_training_scripts_are_understood(tmp_path, state, wrap):
    torch.save(wrap(state), tmp_path / "net.pth")
    assert read_state_dict(tmp_path / "net.pth", CPU).keys() == state.keys()


def test_weights_that_do_not_fit_are_named(tmp_path, state):
    del state["out.bias"]
    state["hidden.weight"] = torch.zeros(5, 5)
    torch.save(state, tmp_path / "net.pth")
    with pytest.raises(HandlerError, match=r"net.pth does not fit the class Net of net.py") as raised:
        load_eager(NET, tmp_path / "net.pth", CPU)
    assert "out.bias" in str(raised.value)
    assert "hidden.weight" in str(raised.value)


def test_pickled_code_is_rejected_with_the_option_that_allows_it(tmp_path, capsys):
    torch.save({"weights": Evil()}, tmp_path / "net.pth")
    with pytest.raises(HandlerError, match="weights_only: false") as raised:
        read_state_dict(tmp_path / "net.pth", CPU)
    assert "print" in str(raised.value)
    assert capsys.readouterr().out == ""


def test_model_file_is_named_when_missing(tmp_path):
    with pytest.raises(RuntimeError, match=r"Missing the model.py file: there is no gone.py"):
        load_eager(tmp_path / "gone.py", None, CPU)


def test_one_class_is_expected_and_another_can_be_named(tmp_path):
    file = tmp_path / "two.py"
    file.write_text(
        "import torch\n\nclass Block(torch.nn.Module):\n    pass\n\nclass Top(torch.nn.Module):\n    pass\n"
    )
    with pytest.raises(ValueError, match="Expected only one class as model definition") as raised:
        load_eager(file, None, CPU)
    assert "model_class" in str(raised.value)
    assert type(load_eager(file, None, CPU, class_name="Top")).__name__ == "Top"
    with pytest.raises(ValueError, match="has no Nobody"):
        load_eager(file, None, CPU, class_name="Nobody")


def test_fresh_weights_are_random_without_a_file(tmp_path):
    shutil.copy(NET, tmp_path / "fresh.py")
    net = load_eager(tmp_path / "fresh.py", None, CPU)
    assert net.out.weight.std() > 0
