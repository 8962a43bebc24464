from __future__ import annotations

import zipfile

import pytest

from flambeau.errors import HandlerError
from flambeau.handlers.loaders.formats import ModelFormat, recognize


def zip_of(path, *names):
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return path


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["m/data.pkl", "m/constants.pkl", "m/code/__torch__.py"], ModelFormat.TORCHSCRIPT),
        (["m/data.pkl", "m/data/0", "m/version"], ModelFormat.PICKLE),
        (["m/archive_format", "m/models/model.json"], ModelFormat.EXPORTED),
        (["m/archive_format", "m/data/aotinductor/model/x.so"], ModelFormat.AOTI_PACKAGE),
    ],
)
def test_zip_files_are_recognized_by_their_content(tmp_path, names, kind):
    assert recognize(zip_of(tmp_path / "any.name", *names)) is kind


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b"  <!DOCTYPE html><html>", "an HTML page"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"PK\x03\x04 and no end", "truncated"),
        (b"just some words", "text"),
        (b"\x80\x04\x95abc", "a pickle that torch.save did not write"),
        (b"\xff\x00\x01\x02\x03\x04\x05\x06\x07", "ff 00 01 02"),
        (b"\x40\x00\x00\x00\x00\x00\x00\x00{", "binary data"),  # a header longer than the file
        (b"\x7fELF\x02\x01" + b"\xff" * 58, "truncated native library"),
    ],
)
def test_other_formats_are_described(tmp_path, content, words):
    file = tmp_path / "model.pt"
    file.write_bytes(content)
    with pytest.raises(HandlerError, match=r"model.pt looks like") as raised:
        recognize(file)
    assert words in str(raised.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(HandlerError, match=r"gone.pt cannot be read: it is not among the model's files"):
        recognize(tmp_path / "gone.pt")


def test_zip_of_something_else(tmp_path):
    with pytest.raises(HandlerError, match="that torch did not write"):
        recognize(zip_of(tmp_path / "model.pt", "readme.txt"))
