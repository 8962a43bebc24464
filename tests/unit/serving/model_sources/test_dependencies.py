from __future__ import annotations

import asyncio
import os
import sys

import pytest

from flambeau.errors import DependenciesFailed
from flambeau.serving.model_sources import dependencies
from flambeau.serving.model_sources.dependencies import (
    SERVER_ENVIRONMENT,
    Dependencies,
    PythonEnvironment,
    constraints,
    key_of,
    pip,
    run,
)
from support.wheels import write_wheel


def test_packages_come_after_what_the_operator_put_on_the_path(tmp_path):
    environment = PythonEnvironment(packages=tmp_path)
    assert environment.extend({"PYTHONPATH": "/own"})["PYTHONPATH"] == f"/own{os.pathsep}{tmp_path}"
    assert environment.extend({})["PYTHONPATH"] == str(tmp_path)
    assert SERVER_ENVIRONMENT.extend({"A": "b"}) == {"A": "b"}


async def test_python_brings_a_pip_where_none_is_installed(monkeypatch):
    find = dependencies.importlib.util.find_spec
    monkeypatch.setattr(dependencies.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    command = pip()
    assert command[1].endswith(".whl/pip")

    status, lines = await run([*command, "--version"], dependencies.Path.cwd(), lambda line: None)
    assert (status, lines[0][:4]) == (0, "pip ")


async def test_cancelled_command_is_killed_with_its_children(tmp_path):
    child = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid())); print('begun', flush=True)"
    command = [sys.executable, "-c", f"{child}; __import__('time').sleep(600)"]
    begun = asyncio.Event()
    task = asyncio.create_task(run(command, tmp_path, lambda line: begun.set()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_command_that_floods_its_pipe_is_ended_too(tmp_path):
    command = [sys.executable, "-c", "while True: print('x' * 60_000)"]
    for _ in range(5):
        begun = asyncio.Event()
        task = asyncio.create_task(run(command, tmp_path, lambda line, begun=begun: begun.set()))
        await begun.wait()
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=60)
        assert done, "it waits for output that nobody reads"


@pytest.mark.parametrize("named", ["missing.txt", "../outside.txt"])
async def test_requirements_must_lie_in_the_archive(tmp_path, named):
    (tmp_path / "outside.txt").touch()
    (tmp_path / "model").mkdir()
    builder = Dependencies(install=True, tell=lambda *_: None, cache=tmp_path / "cache")
    with pytest.raises(DependenciesFailed, match=r"^Custom pip package installation failed for model m") as info:
        await builder.prepare("m", tmp_path / "model", named, use_venv=False)
    assert "not in the archive" in info.value.cause


async def test_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "cache").write_text("a file")
    builder = Dependencies(install=False, tell=lambda *_: None, cache=tmp_path / "cache")
    with pytest.raises(DependenciesFailed, match=r"^Virtual environment creation failed for model m") as info:
        await builder.prepare("m", tmp_path, None, use_venv=True)
    assert "XDG_CACHE_HOME" in info.value.cause


async def test_half_built_environment_is_built_again(tmp_path):
    told = []
    builder = Dependencies(install=False, tell=lambda *words: told.append(words), cache=tmp_path)
    first = await builder.prepare("m", tmp_path, None, use_venv=True)
    [place] = [path for path in (tmp_path / "environments").iterdir() if path.is_dir()]
    (place / "complete").unlink()
    (place / "bin" / "python").unlink()
    again = await builder.prepare("m", tmp_path, None, use_venv=True)
    assert again == first
    assert (place / "bin" / "python").exists()


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
