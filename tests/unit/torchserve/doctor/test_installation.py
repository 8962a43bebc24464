"""What is said about a model before it is moved."""

from __future__ import annotations

import argparse
import json
import tarfile
import zipfile

import pytest

from flambeau.torchserve.doctor.handler_class import missing_method
from flambeau.torchserve.doctor.installation import check_model, requirement_name

HANDLER = "from ts.torch_handler.base_handler import BaseHandler\n\n\nclass Mine(BaseHandler):\n    pass\n"


@pytest.fixture
def pack(tmp_path):
    def pack_files(name="m.mar", **files):
        path = tmp_path / name
        model = {"modelName": "m", "handler": files.pop("handler", "handler.py"), **files.pop("model", {})}
        manifest = json.dumps({"runtime": files.pop("runtime", "python"), "model": model})
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("MAR-INF/MANIFEST.json", manifest)
            for file, content in files.get("files", {}).items():
                archive.writestr(file, content)
        return path

    return pack_files


def said(path, *, installs=False):
    return [(finding.level, f"{finding.what}: {finding.text}") for finding in check_model(path, installs=installs)]


def test_model_that_will_work(pack):
    assert said(pack(files={"handler.py": HANDLER})) == [("ok", "m.mar: will work (handler.py)")]


def test_built_in_handler_needs_no_file(pack):
    assert said(pack(handler="image_classifier")) == [("ok", "m.mar: will work (image_classifier)")]


@pytest.mark.parametrize(
    ("packing", "level", "text"),
    [
        ({"handler": "vllm_handler"}, "problem", "it needs vLLM"),
        ({"runtime": "LSP", "handler": "base_handler"}, "problem", "C++ backend"),
        ({"handler": "nowhere_to_be_found.py"}, "problem", "nowhere_to_be_found.py is neither in the archive"),
        ({"handler": "base_handler", "model": {"modelFile": "net.py"}}, "problem", "names net.py, which is not"),
        ({"files": {"handler.py": "class Mine(:\n"}}, "problem", "not valid Python"),
        ({"files": {"handler.py": "import nowhere_to_be_found\n"}}, "problem", "pip install nowhere-to-be-found"),
        ({"files": {"handler.py": "from ts.nowhere import x\n"}}, "problem", "ts.nowhere, which is not part"),
        ({"files": {"handler.py": "from ts.context import Nothing\n"}}, "problem", "ts.context.Nothing"),
        (
            {"files": {"handler.py": HANDLER, "c.yaml": "batchSize: many"}, "model": {"configFile": "c.yaml"}},
            "note",
            "batchSize must be a number",
        ),
        (
            {"files": {"handler.py": HANDLER, "c.yaml": "a: [1"}, "model": {"configFile": "c.yaml"}},
            "problem",
            "not valid YAML",
        ),
        (
            {"files": {"handler.py": HANDLER, "r.txt": "emoji>=2"}, "model": {"requirementsFile": "r.txt"}},
            "note",
            "emoji will not be installed: set install_py_dep_per_model",
        ),
    ],
)
def test_what_will_not_work_is_named_with_the_remedy(pack, packing, level, text):
    findings = said(pack(**packing))
    assert [one for one in findings if one[0] == level and text in one[1]], findings
    assert not [one for one in findings if one[0] == "ok"]


def test_requirements_that_will_be_installed_are_there(pack):
    files = {"handler.py": "import cv2_not_here\nimport nowhere_at_all\n", "r.txt": "cv2-not-here\nNowhere_At_All==1"}
    path = pack(files=files, model={"requirementsFile": "r.txt"})
    assert said(path, installs=True) == [("ok", "m.mar: will work (handler.py)")]


def test_import_that_a_file_can_do_without_is_no_problem(pack):
    code = "try:\n    import nowhere_at_all\nexcept ImportError:\n    pass\n" + HANDLER
    assert said(pack(files={"handler.py": code}))[0][0] == "ok"


def test_modules_of_the_model_itself_are_there(pack):
    files = {"handler.py": "import helper\nfrom parts.one import x\n", "helper.py": "", "parts/one.py": "x = 1"}
    assert said(pack(files=files))[0][0] == "ok"


def test_broken_archive_is_a_problem(tmp_path):
    (tmp_path / "broken.mar").write_bytes(b"nothing")
    assert said(tmp_path / "broken.mar")[0][0] == "problem"


def test_tar_and_folder_are_read_too(tmp_path):
    folder = tmp_path / "m"
    (folder / "MAR-INF").mkdir(parents=True)
    (folder / "MAR-INF" / "MANIFEST.json").write_text('{"model": {"modelName": "m", "handler": "handler.py"}}')
    (folder / "handler.py").write_text(HANDLER)
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as archive:
        archive.add(folder, "m")
    assert said(folder) == [("ok", "m: will work (handler.py)")]
    assert said(tmp_path / "m.tar.gz") == [("ok", "m.tar.gz: will work (handler.py)")]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("numpy", "numpy"),
        ("  Some_Package[extra]>=1 ; python_version > '3'", "some-package"),
        ("./tinylib-1.0-py3-none-any.whl", "tinylib"),
        ("wheels/my_lib-2.1.tar.gz", "my-lib"),
        ("lib @ https://host/lib-1.0.zip", "lib"),
        ("git+https://host/x.git#egg=their-lib", "their-lib"),
        ("git+https://host/x.git", None),
        ("-r more.txt", None),
        ("--find-links wheels", None),
        ("# numpy", None),
        ("", None),
    ],
)
def test_names_in_requirements(line, name):
    assert requirement_name(line) == name


def test_import_that_would_not_be_installed_is_a_problem(pack):
    files = {"handler.py": "import nowhere_at_all\n", "r.txt": "nowhere-at-all"}
    path = pack(files=files, model={"requirementsFile": "r.txt"})
    assert [level for level, _ in said(path)] == ["note", "problem"]


@pytest.mark.parametrize(
    ("content", "levels"), [("whole", ["problem"]), ("state", ["ok"]), ("checkpoint", ["problem"])]
)
def test_weights_with_more_than_tensors_are_named(tmp_path, content, levels):
    torch = pytest.importorskip("torch")
    folder = tmp_path / "m"
    (folder / "MAR-INF").mkdir(parents=True)
    net = torch.nn.Linear(2, 2)
    things = {
        "whole": net,
        "state": net.state_dict(),
        "checkpoint": {"state_dict": net.state_dict(), "args": argparse.Namespace(lr=1)},
    }
    torch.save(things[content], folder / "net.pt")
    model = {"modelName": "m", "handler": "base_handler", "serializedFile": "net.pt"}
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": model}))
    findings = said(folder)
    assert [level for level, _ in findings] == levels
    if levels == ["problem"]:
        assert "weights_only: false" in findings[0][1]


def test_libraries_of_a_handler_that_comes_with_the_server_are_looked_for(pack, monkeypatch):
    monkeypatch.setattr("flambeau.torchserve.doctor.installation.is_installed", lambda name: name != "torchvision")
    assert said(pack(handler="image_classifier")) == [
        ("problem", "m.mar: handler: image_classifier needs torchvision: pip install torchvision")
    ]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("class H:\n    def initialise(self, c): ...\n    def handle(self, d, c): ...\n", "rename initialise"),
        ("class H:\n    def initialize(self, c): ...\n", "class H has no method handle, so it cannot be loaded"),
        ("from x import B\nclass H(B):\n    def handle(self, d, c): ...\n", ""),
        ("class H: ...\nclass I: ...\n", ""),
        ("class H:\n    handle = print\n    def initialize(self, c): ...\n", ""),
        ("class Net: ...\ndef handle(data, context): ...\n", ""),
        ("class H(", ""),
    ],
)
def test_class_without_the_methods_of_a_handler_is_found(source, reason):
    found = missing_method(source.encode())
    assert reason in found
    assert bool(found) == bool(reason)


def test_archive_whose_handler_cannot_be_loaded_does_not_pass(pack):
    [(level, text)] = said(pack(files={"handler.py": b"class H:\n    def handle(self, d): ...\n"}))
    assert (level, "no method initialize" in text) == ("problem", True)
