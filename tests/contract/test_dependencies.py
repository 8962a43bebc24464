"""A model's own requirements: installed before traffic, once, and never over the server's packages."""

from __future__ import annotations

import shutil
import sys

import pytest

from flambeau.archive.pack import Recipe, pack
from support.configured import problem
from support.running import HANDLERS
from support.wheels import write_wheel


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def start(tmp_path, configured, store):
    """Start a server with a cache of its own, and no network."""

    def start_server(*models, **settings):
        env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_RETRIES": "0"}
        return configured(*models, model_store=store, env=env, **{"install_dependencies": True, **settings})

    return start_server


def pack_model(store, name, requirements, *wheels, config=None):
    """An archive with requirements and the wheels they name."""
    work = store.parent / f"work-{name}"
    work.mkdir()
    (work / "requirements.txt").write_text(requirements)
    settings = None
    if config:
        settings = work / "model-config.yaml"
        settings.write_text(config)
    recipe = Recipe(
        model_name=name,
        handler=str(HANDLERS / "needs_tiny.py"),
        requirements_file=work / "requirements.txt",
        config_file=settings,
        extra_files=list(wheels),
    )
    return pack(recipe, store)


def environments(tmp_path):
    return [path for path in (tmp_path / "cache" / "flambeau" / "environments").iterdir() if path.is_dir()]


def test_requirements_are_installed_into_a_cache_and_found_by_the_workers(start, store, tmp_path):
    wheel = write_wheel(tmp_path, "tinylib", "1.5", requires=("msgspec",))
    pack_model(store, "tiny", f"./{wheel.name}\n", wheel)
    pack_model(store, "twin", f"./{wheel.name}\n", wheel)
    server = start()
    assert server.register("tiny.mar", initial_workers=1).status == 200, server.log
    told = server.predict("tiny", {}).json
    assert told["version"] == "1.5"
    assert told["python"] == sys.executable
    assert told["where"].startswith(str(tmp_path / "cache"))  # not into the model folder
    assert not told["msgspec"].startswith(str(tmp_path / "cache"))  # the server has it already
    assert server.logged("tiny: ", "Successfully installed tinylib-1.5")
    # The same requirements are installed once, for other models and after a restart.
    assert server.register("twin.mar", initial_workers=1).status == 200
    assert server.predict("twin", {}).json["where"] == told["where"]
    server.stop()
    again = start()
    assert again.register("tiny.mar", initial_workers=1).status == 200
    assert "pip:" not in again.log
    assert len(environments(tmp_path)) == 1


@pytest.mark.parametrize("kind", ["file", "folder", "folder with settings"])
def test_requirements_beside_a_handler_are_installed(start, tmp_path, kind):
    folder = tmp_path / "tiny"
    folder.mkdir()
    wheel = write_wheel(folder, "tinylib", "1.5")
    (folder / "requirements.txt").write_text(f"./{wheel.name}\n")
    shutil.copy(HANDLERS / "needs_tiny.py", folder / "handler.py")
    if kind == "folder with settings":
        (folder / "model-config.yaml").write_text("batchSize: 2\n")
    path = folder / "handler.py" if kind == "file" else folder
    server = start(path, exact_paths=True)
    server.until(lambda: "Model server started." in server.log)
    assert server.predict("handler" if kind == "file" else "tiny", {}).json["version"] == "1.5"


def test_virtual_environment_runs_the_workers_and_inherits_the_server(start, store, tmp_path):
    wheel = write_wheel(tmp_path, "tinylib", "2.0")
    pack_model(store, "tiny", f"./{wheel.name}\n", wheel, config="useVenv: true\n")
    server = start()
    assert server.register("tiny.mar", initial_workers=1).status == 200, server.log
    told = server.predict("tiny", {}).json
    [place] = environments(tmp_path)
    assert (told["version"], told["python"]) == ("2.0", str(place / "bin" / "python"))
    assert told["where"].startswith(str(place))
    assert not told["msgspec"].startswith(str(place))


def test_models_may_need_different_versions(start, store, tmp_path):
    for version in ("1.0", "2.0"):
        wheel = write_wheel(tmp_path, "tinylib", version)
        pack_model(store, f"tiny{version[0]}", f"./{wheel.name}\n", wheel)
    server = start()
    for name in ("tiny1", "tiny2"):
        assert server.register(f"{name}.mar", initial_workers=1).status == 200
    assert [server.predict(name, {}).json["version"] for name in ("tiny1", "tiny2")] == ["1.0", "2.0"]


@pytest.mark.parametrize("config", [None, "useVenv: true\n"])
def test_failure_is_a_registration_error_and_leaves_nothing(start, store, tmp_path, config):
    wheel = write_wheel(tmp_path, "tinylib", "1.0")
    path = pack_model(store, "tiny", "nowhere-to-be-found==7\n", config=config)
    server = start()
    reply = server.register("tiny.mar", initial_workers=1)
    text = "Custom pip package installation failed for model tiny"
    assert problem(reply) == (400, "ModelException", text)
    assert "No matching distribution found for nowhere-to-be-found==7" in reply.cause
    assert server.manage("GET", "/models/tiny").status == 404
    assert environments(tmp_path) == []
    path.unlink()
    (store.parent / "work-tiny").rename(store.parent / "work-before")
    pack_model(store, "tiny", f"./{wheel.name}\n", wheel, config=config)
    assert server.register("tiny.mar", initial_workers=1).status == 200  # no 409: the name is free


def test_the_servers_torch_is_not_replaced(start, store, tmp_path):
    torch = write_wheel(tmp_path, "torch", "0.0.1")
    pack_model(store, "old", f"./{torch.name}\n", torch)
    server = start()
    reply = server.register("old.mar", initial_workers=1)
    assert reply.status == 400
    assert "torch" in reply.cause


def test_pin_of_a_shared_package_is_refused_with_both_versions_or_ignored_with_a_warning(start, store, tmp_path):
    wheel = write_wheel(tmp_path, "tinylib", "1.5")
    pack_model(store, "pinned", f"torch<0.5\n./{wheel.name}\n", wheel)
    server = start()
    reply = server.register("pinned.mar", initial_workers=1)
    assert reply.status == 400
    assert "requirements.txt: line 1 wants torch<0.5, and models share torch " in reply.cause
    assert "ignore_shared_pins=true" in reply.cause
    server.stop()
    server = start(ignore_shared_pins=True)
    assert server.register("pinned.mar", initial_workers=1).status == 200, server.log
    assert server.predict("pinned", {}).json["version"] == "1.5"
    assert server.logged("torch<0.5", "ignored", level="WARNING")


def test_requirements_wait_for_the_setting(start, store, tmp_path):
    pack_model(store, "tiny", "nowhere-to-be-found==7\n")
    server = start(install_dependencies=False)
    assert server.register("tiny.mar").status == 200
    assert not (tmp_path / "cache" / "flambeau" / "environments").exists()


def test_at_start_the_model_is_skipped_with_the_reason(start, store, tmp_path):
    bad = pack_model(store, "bad", "nowhere-to-be-found==7\n")
    wheel = write_wheel(tmp_path, "tinylib", "1.0")
    good = pack_model(store, "good", f"./{wheel.name}\n", wheel)
    server = start(bad, good)
    assert server.predict("good", {}).json["version"] == "1.0"
    assert server.manage("GET", "/models/bad").status == 404
    assert server.logged("bad.mar", "Custom pip package installation failed for model bad")
    assert server.logged("bad: ", "ERROR: No matching distribution found")


def test_two_servers_build_it_once(start, store, tmp_path):
    wheel = write_wheel(tmp_path, "tinylib", "1.0")
    pack_model(store, "tiny", f"./{wheel.name}\n", wheel)
    servers = [start(), start()]
    calls = [server.at_once(server.register, ["tiny.mar"])[0] for server in servers]
    assert [call.result().status for call in calls] == [200, 200]
    assert sum(server.log.count("Successfully installed") for server in servers) == 1
