"""`torch-model-archiver` and `torch-workflow-archiver`: flags, formats, messages and exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import model_archiver
import workflow_archiver
from model_archiver import ModelArchiver, ModelArchiverConfig
from model_archiver.manifest_components.manifest import RuntimeType
from model_archiver.model_archiver_error import ModelArchiverError
from model_archiver.model_packaging import package_model
from model_archiver.model_packaging_utils import ModelExportUtils
from support.running import path

PROGRAMS = {
    "torch-model-archiver": "from model_archiver.model_packaging import generate_model_archive as run; run()",
    "torch-workflow-archiver": "from workflow_archiver.workflow_packaging import generate_workflow_archive as r; r()",
}
REQUIRED = ["--model-name", "m", "--version", "1.0", "--handler", "code/handler.py"]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "handler.py").write_text("def handle(data, context): return data\n")
    (tmp_path / "spec.yaml").write_text("dag: {}\n")

    def run_program(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAMS[program], *words]
        environment = {**os.environ, "PYTHONPATH": path()}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run_program


def pack_model(run, *words: str) -> subprocess.CompletedProcess[str]:
    return run("torch-model-archiver", *REQUIRED, *words)


def names_in(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as file:
        return set(file.namelist())


def test_all_flags_end_up_in_the_manifest(run, tmp_path):
    for name in ("net.py", "weights.pt", "requirements.txt", "a.yaml", "x1.txt", "x2.txt", "one.bin"):
        (tmp_path / name).write_text(name)
    (tmp_path / "more" / "deep").mkdir(parents=True)
    (tmp_path / "more" / "deep" / "file").write_text("")
    words = ["--model-file", "net.py", "--serialized-file", "weights.pt", "-r", "requirements.txt", "-c", "a.yaml"]
    words += ["--extra-files", "x?.txt,one.bin, more,none*", "--runtime", "python3", "--export-path", "new/store"]
    done = pack_model(run, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "WARNING - No file matches none*\n"
    archive = tmp_path / "new" / "store" / "m.mar"
    files = {"handler.py", "net.py", "weights.pt", "requirements.txt", "a.yaml", "x1.txt", "x2.txt", "one.bin"}
    assert names_in(archive) == files | {"deep/file", "MAR-INF/MANIFEST.json"}
    with zipfile.ZipFile(archive) as file:
        manifest = json.loads(file.read("MAR-INF/MANIFEST.json"))
    assert manifest.pop("createdOn")
    assert manifest == {
        "runtime": "python3",
        "model": {
            "modelName": "m",
            "serializedFile": "weights.pt",
            "handler": "handler.py",
            "modelFile": "net.py",
            "modelVersion": "1.0",
            "requirementsFile": "requirements.txt",
            "configFile": "a.yaml",
        },
        "archiverVersion": model_archiver.__version__,
    }


def test_every_format(run, tmp_path):
    assert pack_model(run, "--archive-format", "default").returncode == 0
    with zipfile.ZipFile(tmp_path / "m.mar") as file:
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_DEFLATED}
    assert pack_model(run, "--archive-format", "zip-store", "-f").returncode == 0
    with zipfile.ZipFile(tmp_path / "m.mar") as file:
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_STORED}
    assert pack_model(run, "--archive-format", "tgz").returncode == 0
    with tarfile.open(tmp_path / "m.tar.gz", "r:gz") as tar:
        assert set(tar.getnames()) == {"m/handler.py", "m/MAR-INF/MANIFEST.json"}
    assert pack_model(run, "--archive-format", "no-archive").returncode == 0
    assert (tmp_path / "m" / "MAR-INF" / "MANIFEST.json").is_file()


@pytest.mark.parametrize(
    ("handler", "packed", "named"),
    [
        ("code/handler.py", {"handler.py"}, "handler.py"),
        ("code/handler", {"handler.py"}, "handler"),
        ("code/handler:entry", {"handler.py"}, "handler:entry"),
        ("code/handler.py:entry", {"handler.py"}, "handler.py:entry"),
        ("image_classifier", set(), "image_classifier"),
        ("vllm_handler", set(), "vllm_handler"),
        ("dali_image_classifier", set(), "dali_image_classifier"),
    ],
)
def test_what_a_handler_may_be(run, tmp_path, handler, packed, named):
    done = run("torch-model-archiver", "--model-name", "m", "-v", "1.0", "--handler", handler)
    assert done.returncode == 0, done.stderr
    assert names_in(tmp_path / "m.mar") == packed | {"MAR-INF/MANIFEST.json"}
    with zipfile.ZipFile(tmp_path / "m.mar") as file:
        assert json.loads(file.read("MAR-INF/MANIFEST.json"))["model"]["handler"] == named


def test_a_native_handler_is_a_library(run, tmp_path):
    (tmp_path / "native.so").write_bytes(b"\x7fELF")
    words = ["--model-name", "m", "-v", "1.0", "--runtime", "LSP", "--handler"]
    assert run("torch-model-archiver", *words, "native:entry").returncode == 0
    assert names_in(tmp_path / "m.mar") == {"native.so", "MAR-INF/MANIFEST.json"}
    assert run("torch-model-archiver", *words, "TorchScriptHandler", "-f").returncode == 0
    assert names_in(tmp_path / "m.mar") == {"MAR-INF/MANIFEST.json"}


def test_mistakes_are_logged_without_a_traceback(run, tmp_path):
    assert pack_model(run).returncode == 0
    again = pack_model(run)
    assert again.returncode == 1
    assert again.stderr.startswith(f"ERROR - {tmp_path}/m.mar already exists.\n")
    assert "Traceback" not in again.stderr
    forced = pack_model(run, "--force")
    assert (forced.returncode, forced.stderr) == (0, f"WARNING - Overwriting {tmp_path}/m.mar ...\n")
    for words, message in (
        (["--model-name", "a b"], "ERROR - Model name 'a b' is not allowed"),
        (
            ["--export-path", "spec.yaml"],
            "ERROR - Given export-path spec.yaml is not a directory",
        ),
        (["--extra-files", "absent"], "ERROR - File does not exist: absent"),
        (["--handler", "absent.py", "-f"], "ERROR - File does not exist: absent.py"),
    ):
        done = pack_model(run, *words, *([] if "-f" in words else ["-f"]))
        assert done.returncode == 1, words
        assert message in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["--model-name", "--handler"])
def test_a_missing_flag_is_a_usage_error(run, missing):
    i = REQUIRED.index(missing)
    done = run("torch-model-archiver", *REQUIRED[:i], *REQUIRED[i + 2 :])
    assert done.returncode == 2
    assert f"the following arguments are required: {missing}" in done.stderr.replace("-v/", "")


def test_of_two_files_with_one_name_the_later_is_taken_with_a_warning(run, tmp_path):
    (tmp_path / "handler.py").write_text("other = 1\n")
    done = pack_model(run, "--extra-files", "handler.py")
    assert done.returncode == 0
    assert "both are named handler.py" in done.stderr
    with zipfile.ZipFile(tmp_path / "m.mar") as file:
        assert file.read("handler.py") == b"other = 1\n"


def test_nothing_in_the_temporary_folder_is_touched(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary" / "m").mkdir(parents=True)
    (tmp_path / "temporary" / "m" / "precious").write_text("mine")
    assert pack_model(run).returncode == 0
    assert [p.name for p in (tmp_path / "temporary").rglob("*")] == ["m", "precious"]


def test_the_python_api_packs_as_the_command_does(tmp_path):
    config = ModelArchiverConfig("m", "image_classifier", "2.0", export_path=str(tmp_path), archive_format="no-archive")
    assert config.runtime == RuntimeType.PYTHON.value
    ModelArchiver.generate_model_archive(config)
    manifest = json.loads((tmp_path / "m" / "MAR-INF" / "MANIFEST.json").read_text())
    assert manifest["model"] == {"modelName": "m", "handler": "image_classifier", "modelVersion": "2.0"}
    with pytest.raises(ModelArchiverError, match=r"m already exists\."):
        package_model(config, ModelExportUtils.generate_manifest_json(config))
    config.force = True
    package_model(config, '{"model": {"modelName": "other"}}')
    assert json.loads((tmp_path / "m" / "MAR-INF" / "MANIFEST.json").read_text())["model"]["modelName"] == "other"
    with pytest.raises(ValueError, match="java"):
        ModelExportUtils.generate_manifest_json(ModelArchiverConfig("m", "h", "1", runtime="java"))


def test_a_workflow_is_packed_with_and_without_a_handler(run, tmp_path):
    words = ["--workflow-name", "flow", "--spec-file", "spec.yaml"]
    assert run("torch-workflow-archiver", *words).returncode == 0
    assert names_in(tmp_path / "flow.war") == {"WAR-INF/MANIFEST.json", "spec.yaml"}
    with zipfile.ZipFile(tmp_path / "flow.war") as file:
        assert json.loads(file.read("WAR-INF/MANIFEST.json"))["archiverVersion"] == workflow_archiver.__version__
    again = run("torch-workflow-archiver", *words, "--handler", "code/handler.py")
    assert again.returncode == 1
    assert again.stderr.startswith(f"ERROR - {tmp_path}/flow.war already exists.\n")
    assert "Traceback" not in again.stderr
    (tmp_path / "x").write_text("")
    (tmp_path / "y").write_text("")
    more = ["--handler", "code/handler.py", "--extra-files", "x,y", "-f", "--export-path", "."]
    assert run("torch-workflow-archiver", *words, *more).returncode == 0
    assert names_in(tmp_path / "flow.war") == {"WAR-INF/MANIFEST.json", "handler.py", "spec.yaml", "x", "y"}
    for wrong in (["--export-path", "absent"], ["--spec-file", "absent"], ["--workflow-name", "a b"]):
        done = run("torch-workflow-archiver", *words, "-f", *wrong)
        assert done.returncode == 1, wrong
        assert done.stderr.splitlines()[-1].startswith("ERROR - "), wrong
    assert run("torch-workflow-archiver").returncode == 2
