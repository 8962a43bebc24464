"""Every format a model can be saved in: from archive to answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flambeau.archive.pack import Recipe, pack
from support.running import RunningServer

torch = pytest.importorskip("torch")

MODELS = Path(__file__).parents[1] / "support" / "models"
NET = MODELS / "net.py"
ROWS = [[0.5, -1.0, 2.0, 0.25], [1.0, 1.0, 1.0, 1.0], [-3.5, 0.125, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # compiling ahead of time takes a while


@dataclass(frozen=True)
class Case:
    """A format: the file, whether it needs a model file, and what the archive's config says."""

    file: str
    has_model_file: bool = False
    config: str = ""
    renamed: str = ""  # the content decides, not the suffix

    @property
    def serialized(self) -> str:
        return self.renamed or self.file


SERVED = {
    "state_dict": Case("net.pth", has_model_file=True),
    "torchscript": Case("net.pt"),
    "exported": Case("net.pt2"),
}
# Loaded one after the other by one process, as a worker loads them: the rest of the way does not depend on the format.
LOADED = {
    "safetensors": Case("net.safetensors", has_model_file=True),
    "package": Case("package.pt2"),
    "library": Case("net.so", config="pt2:\n  export:\n    aot_compile: true\n"),
    "onnx": Case("net.onnx"),
    "whole_module": Case("whole.pth", config="weights_only: false\n"),
}
# The same formats under other names, or of older make: they differ only in how they are told apart at loading.
VARIANTS = {
    "state_dict_old": Case("legacy.pth", has_model_file=True),
    "torchscript_renamed": Case("net.pt", renamed="model.bin"),
    "exported_renamed": Case("net.pt2", renamed="model.pth"),
}
CASES = {**SERVED, **LOADED, **VARIANTS}
WHOLE, WRONG_SHAPE = [1, 2, 3, 4], [1.0, 2.0]
BATCHES = [[ROWS[0]], ROWS[:3], [WHOLE], [[float(number) for number in WHOLE]], [*ROWS[:3], WRONG_SHAPE]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    subprocess.run([sys.executable, str(MODELS / "export.py"), str(folder)], check=True, capture_output=True)
    return folder


def pack_case(name: str, case: Case, source: Path, store: Path, scratch: Path) -> Path:
    scratch.mkdir(parents=True)
    serialized = scratch / case.serialized
    serialized.write_bytes(source.read_bytes())
    config = scratch / "model-config.yaml"
    config.write_text(case.config + "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 100\n")
    recipe = Recipe(
        model_name=name,
        handler="base_handler",
        serialized_file=serialized,
        model_file=NET if case.has_model_file else None,
        # A pickled module is only as good as the class it was pickled from.
        extra_files=[NET] if name.endswith("whole_module") else [],
        config_file=config,
    )
    return pack(recipe, store)


@pytest.fixture(scope="module")
def server(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store, scratch = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("scratch")
    for name, case in SERVED.items():
        pack_case(name, case, files / case.file, store, scratch / name)
    running = RunningServer(tmp_path_factory.mktemp("log") / "server.log", str(store))
    running.until(lambda: running._connects() and running.request("GET", "/startupz").status == 200, timeout=120)
    yield running
    running.stop(timeout=40)


@pytest.fixture(scope="module")
def expected(files: Path) -> list[list[float]]:
    """The answers of a plain script."""
    sys.path.insert(0, str(MODELS))
    from net import Net

    net = Net()
    net.load_state_dict(torch.load(files / "net.pth", weights_only=True))
    with torch.inference_mode():
        return net.eval()(torch.tensor(ROWS)).tolist()


@pytest.mark.parametrize("name", SERVED)
def test_one_request(server, expected, name):
    reply = server.predict(name, ROWS[0])
    assert reply.status == 200, reply.body
    assert reply.json == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("name", SERVED)
def test_batch_equals_a_plain_script_and_a_bad_neighbor_fails_alone(server, expected, name):
    bodies = [*ROWS[:3], WRONG_SHAPE]  # four make a batch
    replies = [future.result() for future in server.at_once(lambda body: server.predict(name, body), bodies)]
    for reply, row in zip(replies[:3], expected[:3], strict=True):
        assert reply.status == 200, reply.body
        assert reply.json == pytest.approx(row, rel=1e-5)
    assert replies[3].status == 400
    assert "shape" in replies[3].message or "dim" in replies[3].message


def break_file(name: str, files: Path, folder: Path) -> Path:
    """An archive with half of the file."""
    case = CASES[name]
    whole = (files / case.file).read_bytes()
    (folder / f"half_{name}").write_bytes(whole[: len(whole) // 2])
    return pack_case(f"broken_{name}", case, folder / f"half_{name}", folder, folder / f"broken_files_{name}")


def leave_out_file(name: str, files: Path, folder: Path) -> Path:
    """An archive without the file that its manifest names."""
    case = CASES[name]
    archive = pack_case(f"missing_{name}", case, files / case.file, folder, folder / f"missing_files_{name}")
    lean = folder / "lean.mar"
    with zipfile.ZipFile(archive) as full, zipfile.ZipFile(lean, "w") as copy:
        for entry in full.namelist():
            if entry != case.serialized:
                copy.writestr(entry, full.read(entry))
    return lean.rename(archive)


def is_missing(name: str) -> str:
    return f"{CASES[name].serialized} cannot be read: it is not among the model's files"


@pytest.fixture(scope="module")
def outcomes(files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a worker answers, or says of an archive that it cannot load."""
    folder = tmp_path_factory.mktemp("loaded")
    archives = [make(name, files, folder) for name in CASES for make in (break_file, leave_out_file)]
    whole = {**LOADED, **VARIANTS}
    archives += [pack_case(name, case, files / case.file, folder, folder / name) for name, case in whole.items()]
    command = [sys.executable, "-m", "support.load_archives", json.dumps(BATCHES), *map(str, archives)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", VARIANTS)
def test_content_decides_and_not_the_suffix(outcomes, expected, name):
    assert outcomes[name]["replies"][0] == [pytest.approx(expected[0], rel=1e-5)]


@pytest.mark.parametrize("name", LOADED)
def test_loaded_model_answers_as_a_plain_script_and_refuses_a_wrong_shape(outcomes, expected, name):
    one, several, whole, floats, wrong = outcomes[name]["replies"]
    assert one == [pytest.approx(expected[0], rel=1e-5)]
    assert several == [pytest.approx(row, rel=1e-5) for row in expected[:3]]
    assert whole == floats
    assert wrong.startswith("refused: ")
    assert "shape" in wrong or "dim" in wrong


@pytest.mark.parametrize("name", CASES)
def test_broken_file_cannot_be_loaded_and_is_named(outcomes, name):
    assert CASES[name].serialized in outcomes[f"broken_{name}"]["failure"]


@pytest.mark.parametrize("name", CASES)
def test_missing_file_cannot_be_loaded_and_is_named(outcomes, name):
    assert is_missing(name) in outcomes[f"missing_{name}"]["failure"]


def test_broken_file_is_refused_and_named(server, files, tmp_path):
    reply = register(server, break_file("torchscript", files, tmp_path))
    assert reply.status >= 400
    assert "net.pt" in json.dumps(reply.json)


def test_missing_file_is_refused_and_named(server, files, tmp_path):
    reply = register(server, leave_out_file("state_dict", files, tmp_path))
    assert reply.status >= 400
    assert is_missing("state_dict") in json.dumps(reply.json)


def register(server: RunningServer, archive: Path):
    """Register an archive that lies outside the store, through a link in it."""
    store = Path(server.process.args[4])
    link = store / archive.name
    os.link(archive, link)
    return server.manage("POST", f"/models?url={archive.name}&initial_workers=1&synchronous=true", timeout=60)


BAD_INPUTS = {
    "empty": (b"", "application/json", "empty"),
    "not JSON": (b"{oops", "application/json", "JSON"),
    "NaN": (b"[NaN, 1, 2, 3]", "application/json", "NaN"),
    "text": (b'["a", "b", "c", "d"]', "application/json", "numbers"),
    "ragged": (b"[[1, 2], [3]]", "application/json", "numbers"),
    "an object": (b'{"x": 1}', "application/json", "numbers"),
    "random bytes": (bytes(range(256)), "application/octet-stream", "JSON"),
    "pickled array": (b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", "", "npy"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_rejected_with_the_reason(server, case):
    body, kind, reason = BAD_INPUTS[case]
    reply = server.predict("torchscript", body, kind=kind)
    assert reply.status == 400, reply.body
    assert reason in reply.message


@pytest.mark.parametrize("name", SERVED)
def test_whole_numbers_stand_for_floats(server, name):
    whole, floats = server.predict(name, [1, 2, 3, 4]), server.predict(name, [1.0, 2.0, 3.0, 4.0])
    assert whole.status == 200, whole.body
    assert whole.json == floats.json


def test_numpy_bytes(server, expected):
    import io

    numpy = pytest.importorskip("numpy")
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.array(ROWS[1], dtype="float32"))
    assert server.predict("exported", buffer.getvalue()).json == pytest.approx(expected[1], rel=1e-5)
