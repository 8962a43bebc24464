from __future__ import annotations

import logging
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest

from flambeau.archive.manifest import MANIFEST, read_manifest
from flambeau.archive.pack import ArchiveFormat, Recipe, check_syntax, files_of, find_handler, pack
from flambeau.archive.unpack import read_manifest_of, unpack
from flambeau.errors import ArchiveError
from support.log_records import logged


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "handler.py").write_text("def handle(data, context): return data\n")
    (folder / "weights.pt").write_bytes(b"weights" * 1000)
    monkeypatch.chdir(folder)
    return folder


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{"model_name": "digits", "handler": "code/handler.py", **changes})


def names_in(archive: Path) -> list[str]:
    with zipfile.ZipFile(archive) as file:
        return file.namelist()


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("format", "name"),
    [("default", "digits.mar"), ("zip-store", "digits.mar"), ("tgz", "digits.tar.gz")],
)
def test_unpacked_archive_equals_what_was_packed(
    project: Path, tmp_path: Path, format: ArchiveFormat, name: str
) -> None:
    Path("model.py").write_text("class Model: ...\n")
    Path("requirements.txt").write_text("numpy\n")
    Path("model-config.yaml").write_text("batchSize: 4\n")
    path = pack(
        recipe(
            version="3",
            serialized_file=Path("weights.pt"),
            model_file=Path("model.py"),
            requirements_file=Path("requirements.txt"),
            config_file=Path("model-config.yaml"),
        ),
        tmp_path / "store",
        format=format,
    )
    assert path == tmp_path / "store" / name
    assert [child.name for child in path.parent.iterdir()] == [name]
    unpack(path, tmp_path / "unpacked")
    unpacked = files_below(tmp_path / "unpacked")
    assert unpacked.pop(MANIFEST)
    assert unpacked == {
        "handler.py": (project / "code" / "handler.py").read_bytes(),
        "weights.pt": (project / "weights.pt").read_bytes(),
        "model.py": b"class Model: ...\n",
        "requirements.txt": b"numpy\n",
        "model-config.yaml": b"batchSize: 4\n",
    }
    manifest = read_manifest(tmp_path / "unpacked")
    assert manifest is not None
    assert manifest == read_manifest_of(path)
    assert (manifest.model_name, manifest.version, manifest.handler) == ("digits", "3", "handler.py")
    assert (manifest.serialized_file, manifest.config_file) == ("weights.pt", "model-config.yaml")


def test_default_is_deflated_and_store_is_not(project: Path, tmp_path: Path) -> None:
    deflated = pack(recipe(serialized_file=Path("weights.pt")), tmp_path / "a").stat().st_size
    stored = pack(recipe(serialized_file=Path("weights.pt")), tmp_path / "b", format="zip-store").stat().st_size
    assert deflated < 1500
    assert stored > 7000


def test_every_entry_of_a_tar_is_below_the_name_of_the_model(project: Path, tmp_path: Path) -> None:
    with tarfile.open(pack(recipe(), tmp_path, format="tgz")) as file:
        assert file.getnames() == ["digits/MAR-INF/MANIFEST.json", "digits/handler.py"]
        assert {(member.uid, member.uname) for member in file} == {(0, "")}


def test_folder_is_merged_into_only_when_forced(project: Path, tmp_path: Path) -> None:
    path = pack(recipe(), tmp_path, format="no-archive")
    assert set(files_below(path)) == {MANIFEST, "handler.py"}
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ArchiveError, match=r"digits already exists\. .*--force"):
        pack(recipe(serialized_file=Path("weights.pt")), tmp_path, format="no-archive")
    pack(recipe(serialized_file=Path("weights.pt")), tmp_path, format="no-archive", force=True)
    assert set(files_below(path)) == {MANIFEST, "handler.py", "weights.pt", "notes.txt"}
    assert read_manifest_of(path) == read_manifest(path)


def test_folder_can_be_packed_in_place(project: Path, tmp_path: Path) -> None:
    path = pack(recipe(), tmp_path, format="no-archive")
    pack(recipe(handler=str(path / "handler.py"), extra_files=[path]), tmp_path, format="no-archive", force=True)
    assert set(files_below(path)) == {MANIFEST, "handler.py"}


def test_existing_archive_is_replaced_only_when_forced(project: Path, tmp_path: Path) -> None:
    path = pack(recipe(version="1"), tmp_path)
    with pytest.raises(ArchiveError, match=r"digits\.mar already exists\. .*--force"):
        pack(recipe(version="2"), tmp_path)
    pack(recipe(version="2"), tmp_path, force=True)
    manifest = read_manifest_of(path)
    assert manifest is not None
    assert manifest.version == "2"


def test_failed_packing_leaves_the_old_archive_and_nothing_else(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    before = pack(recipe(), store).read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "write", fail)
    with pytest.raises(ArchiveError, match="No space left on device"):
        pack(recipe(), store, force=True)
    assert files_below(store) == {"digits.mar": before}


def test_archive_has_the_permissions_of_any_new_file(project: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    assert pack(recipe(), tmp_path).stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize(
    ("handler", "written"),
    [
        ("code/handler.py", "handler.py"),
        ("code/handler.py:predict", "handler.py:predict"),
        ("code/handler", "handler"),
        ("code/handler:predict", "handler:predict"),
    ],
)
def test_handler_may_be_named_with_or_without_suffix_and_function(
    project: Path, tmp_path: Path, handler: str, written: str
) -> None:
    path = pack(recipe(handler=handler), tmp_path)
    manifest = read_manifest_of(path)
    assert manifest is not None
    assert manifest.handler == written
    assert names_in(path) == [MANIFEST, "handler.py"]


def test_built_in_handler_brings_no_file(project: Path, tmp_path: Path) -> None:
    path = pack(recipe(handler="image_classifier"), tmp_path)
    assert names_in(path) == [MANIFEST]


def test_own_file_wins_over_a_built_in_handler_of_its_name(project: Path) -> None:
    assert find_handler("image_classifier") is None
    Path("image_classifier.py").touch()
    assert find_handler("image_classifier") == Path("image_classifier.py")


def test_native_handler_is_a_shared_library(project: Path) -> None:
    Path("native.so").touch()
    assert find_handler("native:make", "LSP") == Path("native.so")
    assert find_handler("TorchScriptHandler", "LSP") is None


def test_missing_handler_is_named_with_the_built_in_ones(project: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"File does not exist: other\.py.*image_classifier"):
        pack(recipe(handler="other"), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_extra_files_may_be_files_folders_and_patterns(project: Path, tmp_path: Path) -> None:
    (project / "assets" / "deep").mkdir(parents=True)
    for name in ("index.json", "en.vocab", "de.vocab", "assets/a.txt", "assets/deep/b.txt", "assets/.keep"):
        (project / name).write_text(name)
    path = pack(recipe(extra_files=["index.json", Path("assets"), "*.vocab"]), tmp_path)
    assert names_in(path) == [
        MANIFEST,
        ".keep",
        "a.txt",
        "de.vocab",
        "deep/b.txt",
        "en.vocab",
        "handler.py",
        "index.json",
    ]


def test_caches_and_hidden_folders_stay_behind(project: Path, tmp_path: Path) -> None:
    for name in ("__pycache__", "__MACOSX", ".git"):
        (project / "assets" / name).mkdir(parents=True)
        (project / "assets" / name / "file").touch()
    assert names_in(pack(recipe(extra_files=["assets"]), tmp_path / "a")) == [MANIFEST, "handler.py"]
    assert names_in(pack(recipe(extra_files=["assets/*"]), tmp_path / "b")) == [MANIFEST, "handler.py"]


def test_pattern_that_matches_nothing_is_only_a_warning(
    project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pack(recipe(extra_files=["*.nothing"]), tmp_path)
    assert logged(caplog, "flambeau.archive.pack") == [("*.nothing",)]


def test_linked_files_are_packed_as_files(project: Path, tmp_path: Path) -> None:
    (project / "assets").mkdir()
    (project / "assets" / "link.pt").symlink_to(project / "weights.pt")
    (project / "assets" / "more").symlink_to(project / "code")
    formats: tuple[ArchiveFormat, ...] = ("default", "tgz")
    for format in formats:
        path = pack(recipe(extra_files=["assets"]), tmp_path, format=format)
        unpack(path, tmp_path / format)
        assert not (tmp_path / format / "link.pt").is_symlink()
        assert (tmp_path / format / "link.pt").read_bytes() == (project / "weights.pt").read_bytes()
        assert (tmp_path / format / "more" / "handler.py").is_file()


def test_folder_that_links_to_itself_is_rejected(project: Path, tmp_path: Path) -> None:
    (project / "code" / "again").symlink_to(project / "code")
    with pytest.raises(ArchiveError, match=r"code/again is a link to one of its parent folders"):
        pack(recipe(extra_files=["code"]), tmp_path)


def test_broken_link_is_rejected(project: Path, tmp_path: Path) -> None:
    (project / "code" / "lost").symlink_to("nowhere")
    with pytest.raises(ArchiveError, match=r"File does not exist: code/lost"):
        pack(recipe(extra_files=["code"]), tmp_path)


def test_two_files_with_one_name_are_both_named(project: Path, tmp_path: Path) -> None:
    (project / "other").mkdir()
    (project / "other" / "handler.py").touch()
    with pytest.raises(ArchiveError, match=r"code/handler\.py and other/handler\.py would both be handler\.py"):
        pack(recipe(extra_files=["other"]), tmp_path)


def test_file_named_like_a_folder_is_rejected(project: Path, tmp_path: Path) -> None:
    (project / "one" / "name").mkdir(parents=True)
    (project / "one" / "name" / "file").touch()
    (project / "name").touch()
    with pytest.raises(ArchiveError, match="name has the name of the folder of one/name/file"):
        pack(recipe(extra_files=["one", "name"]), tmp_path)


def test_file_named_twice_is_packed_once(project: Path, tmp_path: Path) -> None:
    path = pack(recipe(extra_files=["code", "code/handler.py", "code/../code/handler.py"]), tmp_path)
    assert names_in(path) == [MANIFEST, "handler.py"]


def test_archive_is_not_packed_into_itself(project: Path) -> None:
    (project / "code" / "handler.py").rename(project / "handler.py")
    for _ in range(2):
        path = pack(recipe(handler="handler.py", extra_files=["."]), Path(), force=True)
    assert names_in(path) == [MANIFEST, "handler.py", "weights.pt"]


def test_manifest_of_an_older_archive_is_replaced(project: Path, tmp_path: Path) -> None:
    folder = pack(recipe(model_name="old"), tmp_path, format="no-archive")
    path = pack(recipe(handler="base_handler", extra_files=[folder]), tmp_path)
    assert names_in(path) == [MANIFEST, "handler.py"]
    manifest = read_manifest_of(path)
    assert manifest is not None
    assert manifest.model_name == "digits"


def test_file_from_before_the_first_day_of_zip_can_be_packed(project: Path, tmp_path: Path) -> None:
    os.utime(project / "weights.pt", (0, 0))
    assert "weights.pt" in names_in(pack(recipe(serialized_file=Path("weights.pt")), tmp_path))


@pytest.mark.parametrize("field", ["serialized_file", "model_file", "requirements_file", "config_file"])
def test_missing_file_is_named(project: Path, tmp_path: Path, field: str) -> None:
    with pytest.raises(ArchiveError, match="File does not exist: absent"):
        pack(recipe(**{field: Path("absent")}), tmp_path)


def test_missing_extra_file_is_named(project: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"File does not exist: absent\.txt"):
        pack(recipe(extra_files=["absent.txt"]), tmp_path)


@pytest.mark.parametrize("name", ["", "-a", "a/b", "../a", "a b", "a\n"])
def test_bad_model_name_is_rejected(project: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ArchiveError, match="is not allowed; use letters"):
        pack(recipe(model_name=name), tmp_path)


def test_unknown_format_and_runtime_are_rejected(project: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"Unknown archive format 'rar'; use one of: default"):
        pack(recipe(), tmp_path, format=cast(ArchiveFormat, "rar"))
    with pytest.raises(ArchiveError, match=r"Unknown runtime 'java'; use one of: python"):
        pack(recipe(runtime="java"), tmp_path)


def test_export_path_that_is_a_file_is_rejected(project: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArchiveError, match="Cannot pack"):
        pack(recipe(), tmp_path / "file")


def test_two_stars_match_what_one_does(project: Path, tmp_path: Path) -> None:
    # Otherwise the files of inner folders would lie in the archive several times, at the root among others.
    (tmp_path / "tree" / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "inner" / "deep" / "leaf").write_text("")
    path = pack(recipe(handler="image_classifier", extra_files=[str(tmp_path / "tree" / "**")]), tmp_path / "out")
    assert names_in(path) == [MANIFEST, "deep/leaf"]


def test_of_two_files_with_one_name_the_later_may_win(project: Path, tmp_path: Path) -> None:
    Path("handler.py").write_text("other = 1\n")
    with pytest.raises(ArchiveError, match=r"would both be handler\.py"):
        pack(recipe(extra_files=["handler.py"]), tmp_path)
    assert files_of(recipe(extra_files=["handler.py"]), last_wins=True) == {"handler.py": Path("handler.py")}


@pytest.mark.parametrize("source", ["def f(:\n", "x = 1\n\0", "\ufeffx = (\n"])
def test_a_syntax_error_is_named_with_its_place(project: Path, source: str) -> None:
    file = Path("wrong.py")
    file.write_text(source)
    with pytest.raises(ArchiveError, match=r"^wrong\.py(:\d+)?: the handler has a syntax error: "):
        check_syntax(file)
    check_syntax(Path("code/handler.py"))
