from __future__ import annotations

import gzip
import io
import json
import stat
import tarfile
import tempfile
import tracemalloc
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.archive.manifest import MANIFEST
from flambeau.archive.reader import is_tar
from flambeau.archive.unpack import UnpackLimits, leads_outside, list_entries, read_manifest_of, unpack
from flambeau.errors import ArchiveError, BrokenArchive, UnsafeArchive
from support.hostile_archives import write_many_entries

MIB = 1 << 20


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "into"


def make_zip(
    path: Path, files: Iterable[tuple[str | zipfile.ZipInfo, bytes]], *, method: int = zipfile.ZIP_DEFLATED
) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files:
            archive.writestr(name, content, compress_type=method)
    return path


def make_tar(path: Path, members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for header, content in members:
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, *, target: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname, header.mode = kind, target, mode
    return header


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, tarfile.SYMTYPE, target=target), b""


def hard_link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, tarfile.LNKTYPE, target=target), b""


def file(name: str, content: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
    return member(name), content


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_rejected(archive: Path, into: Path, message: str, limits: UnpackLimits | None = None) -> None:
    around = set(into.parent.iterdir())
    with pytest.raises(UnsafeArchive, match=message):
        unpack(archive, into, limits or UnpackLimits())
    assert set(into.parent.iterdir()) == around


# ── what is good arrives ──


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip_is_unpacked_whatever_its_suffix(tmp_path: Path, into: Path, method: int) -> None:
    archive = make_zip(tmp_path / "m.tar.gz", [("a", b"1" * 1000), ("b/", b""), ("b/c", b"2")], method=method)
    unpack(archive, into)
    assert files_below(into) == {"a": b"1" * 1000, "b/c": b"2"}


def test_top_folder_of_a_zip_is_kept(tmp_path: Path, into: Path) -> None:
    unpack(make_zip(tmp_path / "m.mar", [("top/a", b"1")]), into)
    assert files_below(into) == {"top/a": b"1"}


def test_top_folder_that_a_whole_tar_shares_is_dropped(tmp_path: Path, into: Path) -> None:
    archive = make_tar(
        tmp_path / "m.mar",
        [(member("top", tarfile.DIRTYPE), b""), file("top/a", b"1"), file("top/b/c", b"2"), link("top/d", "b/c")],
    )
    unpack(archive, into)
    assert files_below(into) == {"a": b"1", "b/c": b"2", "d": b"2"}


def test_tar_without_a_top_folder_keeps_its_first_level(tmp_path: Path, into: Path) -> None:
    unpack(make_tar(tmp_path / "m.tgz", [file("./a", b"1"), file("./b/c", b"2"), file("b/d", b"3")]), into)
    assert files_below(into) == {"a": b"1", "b/c": b"2", "b/d": b"3"}


def test_tar_of_nothing_but_a_manifest_keeps_its_folder(tmp_path: Path, into: Path) -> None:
    unpack(make_tar(tmp_path / "m.tgz", [file(MANIFEST, b"{}")]), into)
    assert files_below(into) == {MANIFEST: b"{}"}


def test_links_that_stay_inside_are_kept(tmp_path: Path, into: Path) -> None:
    archive = make_tar(
        tmp_path / "m.tgz",
        [file("blobs/one", b"1"), link("snapshot/model.pt", "../blobs/one"), hard_link("two", "blobs/one")],
    )
    unpack(archive, into)
    assert files_below(into) == {"blobs/one": b"1", "snapshot/model.pt": b"1", "two": b"1"}
    assert (into / "snapshot" / "model.pt").is_symlink()


def test_empty_archives_give_an_empty_folder(tmp_path: Path) -> None:
    unpack(make_zip(tmp_path / "m.mar", []), tmp_path / "zip")
    unpack(make_tar(tmp_path / "m.tgz", []), tmp_path / "tar")
    assert list((tmp_path / "zip").iterdir()) == list((tmp_path / "tar").iterdir()) == []


def test_existing_empty_folder_is_filled(tmp_path: Path, into: Path) -> None:
    into.mkdir()
    unpack(make_zip(tmp_path / "m.mar", [("a", b"1")]), into)
    assert [path.name for path in into.iterdir()] == ["a"]


def test_permission_to_run_is_kept_and_setuid_is_not(tmp_path: Path, into: Path) -> None:
    unpack(make_tar(tmp_path / "m.tgz", [(member("run", mode=0o6755), b""), (member("read", mode=0o444), b"")]), into)
    assert stat.S_IMODE((into / "run").stat().st_mode) & ~0o022 == 0o755
    assert stat.S_IMODE((into / "read").stat().st_mode) & ~0o022 == 0o644


# ── what is not, leaves nothing ──


@pytest.mark.parametrize("name", ["../out", "a/../../out", "a/.."])
def test_entry_that_climbs_out_of_the_folder_is_rejected(tmp_path: Path, into: Path, name: str) -> None:
    assert_rejected(
        make_zip(tmp_path / "m.mar", [("ok", b""), (name, b"x")]), into, f"'{name}' is rejected: its path contains"
    )
    assert_rejected(
        make_tar(tmp_path / "m.tgz", [file("ok"), file(name)]), into, f"'{name}' is rejected: its path contains"
    )


@pytest.mark.parametrize("name", ["/etc/out", "//out", "C:out", "c:/out", "a\\..\\..\\out", "\\out"])
def test_absolute_and_windows_paths_are_rejected(tmp_path: Path, into: Path, name: str) -> None:
    message = "absolute|drive letter|backslash"
    assert_rejected(make_zip(tmp_path / "m.mar", [(name, b"x")]), into, message)
    assert_rejected(make_tar(tmp_path / "m.tgz", [file(name)]), into, message)


def test_null_in_a_name_is_rejected(tmp_path: Path, into: Path) -> None:
    archive = make_zip(tmp_path / "m.mar", [("a_b", b"x")])
    archive.write_bytes(archive.read_bytes().replace(b"a_b", b"a\0b"))
    assert_rejected(archive, into, "a null in it")


def test_entries_without_a_name_are_rejected(tmp_path: Path, into: Path) -> None:
    nameless = zipfile.ZipInfo("_")
    nameless.filename = ""
    assert_rejected(make_zip(tmp_path / "m.mar", [(nameless, b"x")]), into, "it has no name")
    assert_rejected(make_zip(tmp_path / "m.mar", [(".", b"x")]), into, "replace the target folder")
    assert_rejected(make_tar(tmp_path / "m.tgz", [link(".", "a")]), into, "replace the target folder")


def test_endless_names_are_rejected(tmp_path: Path, into: Path) -> None:
    assert_rejected(make_zip(tmp_path / "m.mar", [("a" * 5000, b"")]), into, "longer than 4096")
    assert_rejected(make_zip(tmp_path / "m.mar", [("a/" * 60 + "b", b"")]), into, "more than 50 folders")


def test_duplicate_names_are_rejected(tmp_path: Path, into: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        archive = make_zip(tmp_path / "m.mar", [("a", b"1"), ("a", b"2")])
    assert_rejected(archive, into, "'a' is rejected: another entry has the same name")
    assert_rejected(make_zip(tmp_path / "m.mar", [("b/c", b"1"), ("b/./c", b"2")]), into, "has the same name")
    assert_rejected(make_tar(tmp_path / "m.tgz", [file("a"), file("./a")]), into, "has the same name")
    assert_rejected(
        make_tar(tmp_path / "m.tgz", [file("b"), link("a", "b"), link("a", "b")]), into, "has the same name"
    )


def test_file_in_the_place_of_a_folder_is_rejected(tmp_path: Path, into: Path) -> None:
    assert_rejected(make_zip(tmp_path / "m.mar", [("a", b"1"), ("a/b", b"2")]), into, "has the same name")
    assert_rejected(make_zip(tmp_path / "m.mar", [("a/b", b"1"), ("a", b"2")]), into, "has the same name")


@pytest.mark.parametrize("target", ["/etc", "../..", "a/../../etc", "..", "C:\\out", "self"])
def test_link_that_leaves_the_folder_is_rejected(tmp_path: Path, into: Path, target: str) -> None:
    assert_rejected(
        make_tar(tmp_path / "m.tgz", [file("a"), link("self", target)]), into, "'self' is rejected: its link"
    )


def test_link_that_leaves_once_the_top_folder_is_dropped_is_rejected(tmp_path: Path, into: Path) -> None:
    archive = make_tar(tmp_path / "m.tgz", [file("top/a"), link("top/b", "../top/a")])
    assert_rejected(archive, into, "'b' is rejected: its link")


def test_link_that_leaves_through_another_link_is_rejected(tmp_path: Path, into: Path) -> None:
    archive = make_tar(tmp_path / "m.tgz", [file("a/b/c"), link("a/b/root", "../.."), link("out", "a/b/root/../x")])
    assert_rejected(archive, into, "'out' is rejected: its link")


@pytest.mark.parametrize("target", ["../outside", "inside"])
def test_writing_through_a_link_is_rejected(tmp_path: Path, into: Path, target: str) -> None:
    (tmp_path / "outside").mkdir()
    archive = make_tar(tmp_path / "m.tgz", [file("inside/ok"), link("door", target), file("door/planted")])
    assert_rejected(archive, into, "'door' is rejected")
    archive = make_tar(tmp_path / "m.tgz", [file("inside/ok"), link("door", target), link("door/planted", "ok")])
    assert_rejected(archive, into, "'door' is rejected|below a link")
    assert list((tmp_path / "outside").iterdir()) == []


def test_overwriting_a_file_behind_a_link_is_rejected(tmp_path: Path, into: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    archive = make_tar(tmp_path / "m.tgz", [link("door", "../precious"), file("door", b"theirs")])
    assert_rejected(archive, into, "'door' is rejected")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("target", ["../precious", "/etc/hostname", "absent", "link"])
def test_hard_link_to_anything_but_a_file_of_the_archive_is_rejected(tmp_path: Path, into: Path, target: str) -> None:
    (tmp_path / "precious").write_text("mine")
    archive = make_tar(tmp_path / "m.tgz", [file("a"), link("link", "a"), hard_link("door", target)])
    assert_rejected(archive, into, "is rejected")


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"Z"])
def test_devices_and_pipes_are_rejected(tmp_path: Path, into: Path, kind: bytes) -> None:
    assert_rejected(
        make_tar(tmp_path / "m.tgz", [(member("dev", kind), b"")]), into, "'dev' is rejected: it is a device"
    )


def test_symbolic_link_in_a_zip_is_rejected(tmp_path: Path, into: Path) -> None:
    info = zipfile.ZipInfo("door")
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    assert_rejected(
        make_zip(tmp_path / "m.mar", [(info, b"/etc")]), into, "'door' is rejected: .* symbolic link in a zip"
    )


def test_following_links_is_decided_without_touching_a_disk() -> None:
    links = {("a",): "b", ("b",): "c/d", ("c", "up"): "..", ("loop",): "pool", ("pool",): "loop"}
    assert not leads_outside(("a",), links)
    assert not leads_outside(("c", "up"), links)
    assert leads_outside(("x",), {**links, ("x",): "c/up/.."})
    assert leads_outside(("loop",), links)


# ── bombs ──


def test_too_many_entries_are_rejected(tmp_path: Path, into: Path) -> None:
    names = [str(number) for number in range(11)]
    limits = UnpackLimits(max_entries=10)
    assert_rejected(make_zip(tmp_path / "m.mar", [(name, b"") for name in names]), into, "more than 10 entries", limits)
    assert_rejected(make_tar(tmp_path / "m.tgz", [file(name) for name in names]), into, "more than 10 entries", limits)


@pytest.mark.parametrize("claimed", [None, 1])
def test_entries_are_counted_before_they_are_parsed(tmp_path: Path, into: Path, claimed: int | None) -> None:
    archive = write_many_entries(tmp_path / "m.mar", 50_000, claimed=claimed)
    tracemalloc.start()
    try:
        assert_rejected(archive, into, "more than 10000 entries")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_long_directory_is_not_read(tmp_path: Path, into: Path) -> None:
    archive = make_zip(tmp_path / "m.mar", [(f"{number}{'x' * 60_000}", b"") for number in range(3)])
    assert_rejected(archive, into, "more than 5 entries", UnpackLimits(max_entries=5))


def test_archive_in_an_archive_counts_as_one_entry(tmp_path: Path, into: Path) -> None:
    inner = make_zip(tmp_path / "inner.zip", [(str(number), b"") for number in range(30)])
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as outer:
        outer.write(inner, "weights.pt")
        outer.comment = b"so that the end is searched"
    unpack(tmp_path / "m.mar", into, UnpackLimits(max_entries=100))
    assert (into / "weights.pt").read_bytes() == inner.read_bytes()


@given(st.binary(max_size=300), st.integers(0, 400))
def test_damaged_zip_is_rejected_or_unpacked(damage: bytes, at: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = make_zip(Path(folder) / "m.mar", [("a", b"content"), ("b/c", b"more")])
        content = bytearray(archive.read_bytes())
        content[at : at + len(damage)] = damage
        archive.write_bytes(content)
        with suppress(ArchiveError):
            unpack(archive, Path(folder) / "out")


def test_size_limit_counts_all_entries_together(tmp_path: Path, into: Path) -> None:
    archive = make_tar(tmp_path / "m.tgz", [file("a", bytes(600)), file("b", bytes(400))])
    assert_rejected(archive, into, "at entry 'b': it unpacks to more than 999 bytes", UnpackLimits(max_bytes=999))
    unpack(archive, into, UnpackLimits(max_bytes=1000))
    assert (into / "b").stat().st_size == 400


def test_zip_bomb_is_rejected(tmp_path: Path, into: Path) -> None:
    archive = make_zip(tmp_path / "m.mar", [("bomb", bytes(120 * MIB))])
    assert_rejected(archive, into, "at entry 'bomb': it unpacks to more than 1000 times its own size")


def test_tar_bomb_is_rejected(tmp_path: Path, into: Path) -> None:
    archive = make_tar(tmp_path / "m.tgz", [file("bomb", bytes(120 * MIB))])
    assert_rejected(archive, into, "at entry 'bomb': it unpacks to more than 500 times", UnpackLimits(max_ratio=500))


def test_small_archive_may_shrink_as_much_as_it_likes(tmp_path: Path, into: Path) -> None:
    unpack(make_zip(tmp_path / "m.mar", [("zeros", bytes(MIB))]), into, UnpackLimits(max_ratio=2))
    assert (into / "zeros").stat().st_size == MIB


def test_false_size_in_a_header_does_not_pass_the_limit(tmp_path: Path, into: Path) -> None:
    archive = make_zip(tmp_path / "m.mar", [("a", bytes(5000))])
    size, lie = (5000).to_bytes(4, "little"), (10).to_bytes(4, "little")
    archive.write_bytes(archive.read_bytes().replace(size, lie))
    with pytest.raises(BrokenArchive, match="'a' is damaged"):
        unpack(archive, into)
    assert not into.exists()


def test_sparse_tar_entry_is_counted_as_it_is_written(tmp_path: Path, into: Path) -> None:
    headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,1", "GNU.sparse.size": "9999999"}
    header = member("sparse")
    header.pax_headers = headers
    archive = make_tar(tmp_path / "m.tgz", [(header, b"x")])
    assert_rejected(archive, into, "more than 1000000 bytes", UnpackLimits(max_bytes=1_000_000))


def test_endless_tar_header_is_rejected_before_it_is_read(tmp_path: Path, into: Path) -> None:
    archive = make_tar(tmp_path / "m.tgz", [(member("long", tarfile.GNUTYPE_LONGNAME), bytes(2 * MIB)), file("a")])
    assert_rejected(archive, into, "a header of 2097152 bytes")


def test_zeros_after_the_end_of_a_tar_are_counted(tmp_path: Path, into: Path) -> None:
    archive = tmp_path / "m.tgz"
    archive.write_bytes(gzip.compress(bytes(3 * MIB)))
    assert_rejected(archive, into, "more than 1048576 bytes", UnpackLimits(max_bytes=MIB, max_entries=10))


# ── broken ones ──


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty: copy or download it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer"),
        (b"\n<!DOCTYPE html><html>", "it is a page of a web site"),
        (b"hello", "is it complete"),
    ],
)
def test_file_that_is_no_archive_is_called_what_it_is(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "m.mar").write_bytes(content)
    with pytest.raises(BrokenArchive, match=words):
        is_tar(tmp_path / "m.mar")


@pytest.mark.parametrize("content", [b"", b"PK", b"not an archive", bytes(10240)])
def test_file_that_is_no_archive_is_named(tmp_path: Path, into: Path, content: bytes) -> None:
    (tmp_path / "m.mar").write_bytes(content)
    with pytest.raises(BrokenArchive, match=r"m\.mar is neither a zip nor a gzipped tar"):
        unpack(tmp_path / "m.mar", into)
    assert not into.exists()


def test_missing_archive_is_named(tmp_path: Path, into: Path) -> None:
    with pytest.raises(BrokenArchive, match=r"m\.mar cannot be read: No such file"):
        unpack(tmp_path / "m.mar", into)
    assert not into.exists()


def test_gzip_of_something_else_is_broken(tmp_path: Path, into: Path) -> None:
    (tmp_path / "m.tgz").write_bytes(gzip.compress(b"hello" * 1000))
    with pytest.raises(BrokenArchive, match="damaged or truncated"):
        unpack(tmp_path / "m.tgz", into)


@pytest.mark.parametrize("name", ["m.mar", "m.tgz"])
def test_archive_cut_short_anywhere_is_broken(tmp_path: Path, into: Path, name: str) -> None:
    noise = b"".join(number.to_bytes(2, "little") for number in range(3000))
    if name == "m.mar":
        whole = make_zip(tmp_path / name, [("a", noise), ("b", noise)]).read_bytes()
    else:
        whole = make_tar(tmp_path / name, [file("a", noise), file("b", noise)]).read_bytes()
    for length in [*range(4, len(whole) - 1, len(whole) // 50), len(whole) - 1]:
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(BrokenArchive):
            unpack(tmp_path / name, into)
        assert not into.exists()


def test_tar_cut_short_before_it_was_gzipped_is_broken(tmp_path: Path, into: Path) -> None:
    whole = gzip.decompress(make_tar(tmp_path / "m.tgz", [file("a", bytes(2000)), file("b")]).read_bytes())
    (tmp_path / "m.tgz").write_bytes(gzip.compress(whole[:1500]))
    with pytest.raises(BrokenArchive, match="'a' is damaged or truncated"):
        unpack(tmp_path / "m.tgz", into)


def test_damaged_tar_header_is_not_taken_for_the_end(tmp_path: Path, into: Path) -> None:
    whole = bytearray(gzip.decompress(make_tar(tmp_path / "m.tgz", [file("a"), file("b")]).read_bytes()))
    whole[1024 + 150] ^= 0xFF
    (tmp_path / "m.tgz").write_bytes(gzip.compress(whole))
    with pytest.raises(BrokenArchive, match="a header is invalid"):
        unpack(tmp_path / "m.tgz", into)


def test_flipped_bit_in_a_zip_is_noticed(tmp_path: Path, into: Path) -> None:
    archive = make_zip(tmp_path / "m.mar", [("a", b"content")], method=zipfile.ZIP_STORED)
    archive.write_bytes(archive.read_bytes().replace(b"content", b"cantent"))
    with pytest.raises(BrokenArchive, match="'a' is damaged or truncated: Bad CRC"):
        unpack(archive, into)


def test_other_ways_of_packing_a_zip_are_named(tmp_path: Path, into: Path) -> None:
    archive = make_zip(tmp_path / "m.mar", [("a", b"1")], method=zipfile.ZIP_BZIP2)
    with pytest.raises(BrokenArchive, match=r"'a' of .* is encrypted, or neither stored nor deflated"):
        unpack(archive, into)


def test_folder_that_holds_something_is_left_alone(tmp_path: Path, into: Path) -> None:
    into.mkdir()
    (into / "mine").touch()
    with pytest.raises(ArchiveError, match="is not empty"):
        unpack(make_zip(tmp_path / "m.mar", [("a", b"1")]), into)
    assert [path.name for path in into.iterdir()] == ["mine"]


def test_existing_empty_folder_outlives_a_failure(tmp_path: Path, into: Path) -> None:
    into.mkdir()
    with pytest.raises(UnsafeArchive):
        unpack(make_zip(tmp_path / "m.mar", [("a", b"1"), ("../b", b"2")]), into)
    assert list(into.iterdir()) == []


def test_disk_errors_are_not_reported_as_a_broken_archive(tmp_path: Path, into: Path) -> None:
    archive = make_zip(tmp_path / "m.mar", [("ok", b"1"), ("a" * 300, b"1")])
    with pytest.raises(ArchiveError, match=r"'aaa.*' cannot be written: File name too long") as caught:
        unpack(archive, into)
    assert not isinstance(caught.value, BrokenArchive | UnsafeArchive)
    assert not into.exists()


# ── looking inside ──


def test_entries_of_a_zip_are_listed_with_their_sizes(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "m.mar", [("b", bytes(1000)), ("c/", b""), ("c/a", b"1")])
    entries = list_entries(archive)
    assert [(entry.name, entry.size_bytes) for entry in entries] == [("b", 1000), ("c/a", 1)]
    assert entries[0].packed_bytes < 50


def test_entries_of_a_tar_share_its_packed_size(tmp_path: Path) -> None:
    archive = make_tar(tmp_path / "m.tgz", [file("a", bytes(3000)), file("b", bytes(1000)), link("c", "a")])
    entries = list_entries(archive)
    assert [(entry.name, entry.size_bytes) for entry in entries] == [("a", 3000), ("b", 1000), ("c", 0)]
    assert abs(sum(entry.packed_bytes for entry in entries) - archive.stat().st_size) <= 2
    assert list_entries(make_tar(tmp_path / "empty.tgz", [])) == []


def test_manifest_is_read_without_unpacking(tmp_path: Path) -> None:
    content = json.dumps({"model": {"modelName": "m"}}).encode()
    for archive in (
        make_zip(tmp_path / "zip", [("a", b""), (MANIFEST, content)]),
        make_tar(tmp_path / "wrapped", [file("top/" + MANIFEST, content), file("top/a")]),
        make_tar(tmp_path / "bare", [file("a"), file("./" + MANIFEST, content)]),
    ):
        manifest = read_manifest_of(archive)
        assert manifest is not None
        assert manifest.model_name == "m"


def test_manifest_that_would_not_be_at_the_root_is_not_the_archives(tmp_path: Path) -> None:
    assert read_manifest_of(make_zip(tmp_path / "zip", [("top/" + MANIFEST, b"{}")])) is None
    assert read_manifest_of(make_tar(tmp_path / "tar", [file("top/" + MANIFEST, b"{}"), file("other/a")])) is None
    assert read_manifest_of(tmp_path) is None


def test_manifest_in_an_archive_must_be_json_and_small(tmp_path: Path) -> None:
    with pytest.raises(BrokenArchive, match=r"MANIFEST.json of .*m\.mar is not JSON"):
        read_manifest_of(make_zip(tmp_path / "m.mar", [(MANIFEST, b"{")]))
    with pytest.raises(UnsafeArchive, match="larger than 1048576 bytes"):
        read_manifest_of(make_zip(tmp_path / "m.mar", [(MANIFEST, bytes(2 * MIB))]))
