"""Models that nobody packed: a folder with its model-config, a lone model file, a handler beside its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from flambeau.cli.run import open_model
from support.load_archives import outcome_of
from support.models.net import Net

NET = Path(__file__).parents[1] / "support" / "models" / "net.py"
ROW = [0.5, -1.0, 2.0, 0.25]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def expected(net):
    with torch.inference_mode():
        return pytest.approx(net(torch.tensor([ROW]))[0].tolist(), rel=1e-5)


@pytest.fixture
def folder(tmp_path, net):
    """A folder with a network and its weights."""
    path = tmp_path / "network"
    path.mkdir()
    shutil.copy(NET, path / "model.py")
    torch.save(net.state_dict(), path / "weights.pth")
    return path


def save_program(net, path):
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.export.save(torch.export.export(net, (torch.zeros(2, 4),), dynamic_shapes=({0: batch},)), path)


def loaded_answer(path):
    """The name of the model, and its answer: loaded as by a worker, in this process."""
    with open_model(path, batch_size=1) as load:
        name = load.model
    return name, outcome_of(path, [[ROW]])["replies"][0][0]


def test_model_config_names_the_handler_and_its_settings_count(start, folder, expected):
    (folder / "model-config.yaml").write_text("handler: base_handler\nbatchSize: 3\n")
    server = start(folder).wait_ready()
    assert server.predict("network", ROW).json == expected
    assert server.describe("network")["batchSize"] == 3


def test_files_and_name_can_be_said(start, folder, expected):
    (folder / "weights.pth").rename(folder / "old.pth")
    shutil.copy(folder / "old.pth", folder / "new.pth")
    (folder / "model.py").rename(folder / "architecture.py")
    config = "handler: {name: base_handler}\nmodelName: named\nserializedFile: new.pth\nmodelFile: architecture.py\n"
    (folder / "model-config.yaml").write_text(config)
    server = start(folder, "--name", "mine").wait_ready()
    assert server.predict("mine", ROW).json == expected


def test_folder_with_a_handler_named_on_the_command_line(start, folder, expected):
    server = start(folder, "--handler", "base_handler").wait_ready()
    assert server.predict("network", ROW).json == expected


def test_handler_file_finds_the_weights_beside_it(folder, expected):
    code = "from flambeau.handlers.base import BaseHandler\n\n\nclass Mine(BaseHandler):\n    pass\n"
    (folder / "mine.py").write_text(code)
    assert loaded_answer(folder / "mine.py") == ("mine", expected)


def test_lone_model_file_is_served(start, tmp_path, net, expected):
    save_program(net, tmp_path / "exported.pt2")
    assert start(tmp_path / "exported.pt2").wait_ready().predict("exported", ROW).json == expected


def test_weights_file_is_served_with_the_model_file_beside_it(folder, expected):
    assert loaded_answer(folder / "weights.pth") == ("weights", expected)


def test_folder_that_names_no_handler_says_so(start, folder):
    (folder / "model-config.yaml").write_text("batchSize: 3\n")
    server = start(folder)
    assert server.process.wait(60) == 1
    assert "handler" in server.log
    assert "Traceback" not in server.log


def test_link_to_a_model_file_is_served_by_its_own_name(tmp_path, net, expected):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    save_program(net, blobs / "exported.pt2")
    (blobs / "exported.pt2").rename(blobs / "0a1b2c")
    (snapshot / "exported.pt2").symlink_to(blobs / "0a1b2c")
    assert loaded_answer(snapshot / "exported.pt2") == ("exported", expected)


def test_model_config_beside_a_model_file_names_its_handler(start, folder, expected):
    code = "from flambeau.handlers.base import BaseHandler\n\n\nclass Mine(BaseHandler):\n    pass\n"
    (folder / "mine.py").write_text(code)
    (folder / "model-config.yaml").write_text("handler: {name: base_handler}\nbatchSize: 5\n")
    server = start(folder / "weights.pth").wait_ready()
    assert server.predict("weights", ROW).json == expected
    assert server.describe("weights")["batchSize"] == 5


def test_program_does_not_mind_the_model_file_of_a_training_folder(folder, net, expected):
    save_program(net, folder / "exported.pt2")
    assert loaded_answer(folder / "exported.pt2") == ("exported", expected)
