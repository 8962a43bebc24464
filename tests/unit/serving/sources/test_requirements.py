from __future__ import annotations

from flambeau.serving.sources.requirements import constraints, key_of
from support.wheels import write_wheel


def test_what_is_shared_with_the_server_is_pinned():
    installed = [("torch", "2.7.0+cpu"), ("nvidia-cublas-cu12", "12.1"), ("numpy", "2.0"), ("torchmetrics", "1.0")]
    assert constraints(installed) == ["nvidia-cublas-cu12==12.1", "torch==2.7.0+cpu"]


def key(folder, text, base=("python 3",)):
    (folder / "requirements.txt").write_text(text)
    return key_of(folder / "requirements.txt", folder, base)


def test_key_changes_with_lines_wheels_and_the_installation(tmp_path):
    wheel = write_wheel(tmp_path, "tinylib", "1.0")
    first = key(tmp_path, f"./{wheel.name}\n")
    assert key(tmp_path, f"./{wheel.name}\n") == first
    assert key(tmp_path, f"./{wheel.name}\n", ("python 4",)) != first
    assert key(tmp_path, f"./{wheel.name}  # why\n") != first
    write_wheel(tmp_path, "tinylib", "1.0", requires=("other",))
    assert key(tmp_path, f"./{wheel.name}\n") != first


def test_key_sees_what_is_named_in_other_ways(tmp_path):
    (tmp_path / "wheels").mkdir()
    lines = "-r more.txt\n--find-links=wheels\ntinylib @ file:tiny-1-py3-none-any.whl\n"
    (tmp_path / "more.txt").write_text("-r requirements.txt\nx\n")
    seen = {key(tmp_path, lines)}
    (tmp_path / "more.txt").write_text("-r requirements.txt\ny\n")
    seen.add(key(tmp_path, lines))
    write_wheel(tmp_path / "wheels", "tinylib", "1.0")
    seen.add(key(tmp_path, lines))
    (tmp_path / "tiny-1-py3-none-any.whl").write_bytes(b"1")
    seen.add(key(tmp_path, lines))
    assert len(seen) == 4


def test_files_outside_the_archive_are_not_looked_at(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret").write_text("1")
    first = key(inside, "-r ../secret\n./\n/etc/passwd\n")
    (tmp_path / "secret").write_text("2")
    assert key(inside, "-r ../secret\n./\n/etc/passwd\n") == first
