from __future__ import annotations

from types import SimpleNamespace

import pytest

from flambeau.archive.manifest import Manifest
from flambeau.config.model import ModelConfig
from flambeau.config.server import ServerConfig
from flambeau.errors import (
    BadRequest,
    BrokenArchive,
    DefaultVersionInUse,
    ModelExists,
    ModelNotFound,
    VersionNotFound,
    WorkersFailed,
)
from flambeau.serving.mirror import Mirror
from flambeau.serving.model_sources.store import Source
from flambeau.serving.registry import Registry, check_name, check_runtime, name_from, new_model, settings_of
from flambeau.serving.traffic_split import KEY_HEADER


@pytest.fixture
def registry():
    registry = Registry()
    for name, version in (("b", "1"), ("b", "2"), ("a", "1")):
        registry.add(FakeModel(version, name=name))
    return registry


def test_first_version_is_the_default(registry):
    assert registry.find("b").version == "1"
    assert [model.name for model in registry.defaults()] == ["a", "b"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_default_of_models_that_are_loaded_together_is_the_first_of_them(order):
    registry = Registry()
    for place in order:
        registry.add(FakeModel(str(place), name="m"), place)
    assert registry.find("m").version == "0"


def test_default_that_was_chosen_stays():
    registry = Registry()
    for version in ("2", "3"):
        registry.add(FakeModel(version, name="m"), int(version))
    registry.set_default("m", "3")
    registry.add(FakeModel("1", name="m"), 1)
    assert registry.find("m").version == "3"
    registry.remove("m", "1"), registry.remove("m", "2"), registry.remove("m", "3")
    registry.add(FakeModel("5", name="m"))  # by a call, not at the start
    registry.add(FakeModel("0", name="m"), 0)
    assert registry.find("m").version == "5"


def test_what_is_missing_is_named(registry):
    with pytest.raises(ModelNotFound, match="Model not found: c"):
        registry.find("c")
    with pytest.raises(VersionNotFound, match="Model version: 9 does not exist for model: b"):
        registry.find("b", "9")


@pytest.mark.parametrize(
    ("suggests", "asked", "message"),
    [
        (True, "cat-modle", "Model not found: cat-modle; did you mean Cat_Model?"),
        (True, "zzz", "Model not found: zzz"),
        (True, "x" * 10_000, "Model not found: " + "x" * 10_000),
        (False, "cat-modle", "Model not found: cat-modle"),
    ],
)
def test_similar_name_is_suggested_where_that_is_on(suggests, asked, message):
    registry = Registry(suggests=suggests)
    registry.add(FakeModel("1", name="Cat_Model"))
    with pytest.raises(ModelNotFound) as error:
        registry.find(asked)
    assert str(error.value) == message


def test_version_cannot_be_registered_twice(registry):
    with pytest.raises(ModelExists, match="Model version 1 is already registered for model a"):
        registry.add(FakeModel("1", name="a"))


def test_default_version_goes_last(registry):
    with pytest.raises(DefaultVersionInUse):
        registry.remove("b")
    registry.remove("b", "1", even_default=True)
    assert registry.find("b").version == "2"
    registry.add(FakeModel("1", name="b"))
    registry.remove("b", "1")
    registry.remove("b")
    with pytest.raises(ModelNotFound):
        registry.find("b")


def test_only_the_very_model_is_discarded(registry):
    registry.discard(FakeModel("1", name="a"))
    assert registry.find("a")
    registry.discard(registry.find("a"))
    with pytest.raises(ModelNotFound):
        registry.find("a")
    default = registry.find("b")
    registry.discard(default)
    registry.discard(default)
    assert registry.find("b").version == "2"


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "a\x00", "a\u2028b"])
def test_names_hold_no_control_characters(name):
    with pytest.raises(BadRequest, match="may hold no control characters"):
        check_name(name)
    check_name("Größe 模型-1.0")


@pytest.mark.parametrize(
    ("url", "name"),
    [("a.mar", "a"), ("x/my-model.tar.gz", "my_model"), ("_a.tgz", "_a"), ("https://h/b.1.mar", "b_1")],
)
def test_model_without_a_name_is_named_by_its_file(url, name):
    assert name_from(url) == name


def test_overrides_beat_the_models_file_and_that_beats_the_servers(tmp_path):
    (tmp_path / "model-config.yaml").write_text("batchSize: 3\nminWorkers: 3\n")
    manifest = Manifest(model_name="m", version="1.0", config_file="model-config.yaml")
    source = Source(url="m", folder=tmp_path, manifest=manifest)
    server = ServerConfig(models={"m": {"1.0": {"batchSize": 2, "maxBatchDelay": 7}}})
    settings = settings_of(server, source, "m", ModelConfig(), {"min_workers": 5}, workers=True)
    assert (settings.batch_size, settings.batch_delay_s, settings.min_workers) == (3, 0.007, 5)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"name": ""}, BrokenArchive),
        ({"handler": None}, BrokenArchive),
        ({"name": "taken"}, ModelExists),
        ({"problem": "it is no archive"}, WorkersFailed),
    ],
)
def test_what_cannot_be_a_model_is_refused(tmp_path, change, error):
    registry = Registry()
    registry.add(FakeModel("1.0", name="taken"))
    options = {"name": "m", "handler": "h.py", "runtime": None, "problem": "", **change}
    manifest = Manifest(model_name="m", version="1.0")
    source = Source(url="m", folder=tmp_path, manifest=manifest, problem=options.pop("problem"))
    host = SimpleNamespace(config=ServerConfig())
    with pytest.raises(error):
        new_model(source, settings=ModelConfig(min_workers=1), registry=registry, host=host, **options)


def test_unknown_runtime_is_refused():
    for runtime in (None, "python", "python3", "LSP"):
        check_runtime(runtime)
    with pytest.raises(BadRequest, match="Invalid RuntimeType value: java"):
        check_runtime("java")


# ---- versions that share requests ----


class FakeModel:
    def __init__(
        self, version: str, *, name: str = "m", envelope: str = "", sequences: bool = False, abilities: str = ""
    ) -> None:
        self.name, self.version, self.envelope = name, version, envelope
        self.config = ModelConfig(sequence_batching=sequences)
        self.abilities = frozenset(abilities.split())
        self.pool = SimpleNamespace(can_answer=True, has_loaded=True)
        self.split = None
        self.mirror = Mirror(lambda job: None, lambda: True)


def registry_of(*models: FakeModel) -> Registry:
    registry = Registry()
    for model in models:
        registry.add(model)
    return registry


def test_shares_follow_the_default_and_end_with_their_version():
    first, _, third = models = [FakeModel(version) for version in ("1", "2", "3")]
    registry = registry_of(*models)
    registry.set_traffic("m", "2", 10)
    registry.set_traffic("m", "3", 30)
    assert [first.split.percent_of(model) for model in models] == [60, 10, 30]
    registry.set_default("m", "3")
    assert [first.split.percent_of(model) for model in models] == [0, 10, 90]
    registry.set_traffic("m", "2", 0)
    assert [model.split for model in models] == [None, None, None]
    registry.set_traffic("m", "2", 100)
    registry.remove("m", "2")
    assert (first.split, third.split) == (None, None)
    late = FakeModel("4")
    registry.set_traffic("m", "1", 50)
    registry.add(late)
    assert late.split is third.split is not None


def test_keys_stay_with_a_version_while_it_grows_beside_another():
    first, second, _ = models = [FakeModel(version) for version in ("1", "2", "3")]
    registry = registry_of(*models)
    registry.set_traffic("m", "2", 10)
    registry.set_traffic("m", "3", 30)
    keys = [[(KEY_HEADER, f"user-{number}")] for number in range(300)]
    before = [key for key in keys if first.split.choose(key) is second]
    registry.set_traffic("m", "2", 20)
    assert before
    assert all(first.split.choose(key) is second for key in before)


def test_shares_end_where_the_new_default_cannot_share(caplog):
    models = [FakeModel("1"), FakeModel("2"), FakeModel("3"), FakeModel("4", sequences=True)]
    registry = registry_of(*models)
    registry.set_traffic("m", "2", 10)
    registry.set_mirror("m", "3", 50)
    registry.set_default("m", "4")
    assert [model.split for model in models] == [None] * 4
    assert [model.mirror.percent for model in models] == [0] * 4
    assert "sequenceBatching" in caplog.text


def test_a_version_that_turns_out_to_lack_an_ability_gets_nothing():
    first, second = FakeModel("1", abilities="generate"), FakeModel("2", abilities="generate")
    registry = registry_of(first, second)
    second.pool.has_loaded = False
    registry.set_traffic("m", "2", 100)
    assert first.split.choose([]) is second
    second.pool.has_loaded, second.abilities = True, frozenset()
    assert first.split.choose([]) is first
    with pytest.raises(BadRequest, match="version 2 cannot generate"):
        registry.set_mirror("m", "2", 1)


@pytest.mark.parametrize(
    ("second", "percent", "message"),
    [
        (FakeModel("2", abilities="generate"), 101, "more than 100 %"),
        (FakeModel("2", sequences=True), 10, "sequenceBatching"),
        (FakeModel("2", envelope="kserve"), 10, r"envelopes differ \(kserve and none\)"),
        (FakeModel("2", abilities="embed"), 10, "version 2 cannot generate"),
    ],
)
def test_versions_that_cannot_share_requests_are_refused(second, percent, message):
    registry = registry_of(FakeModel("1", abilities="generate"), second)
    with pytest.raises(BadRequest, match=message):
        registry.set_traffic("m", "2", percent)
    registry.set_traffic("m", "2", 0)
    with pytest.raises(BadRequest, match="version 1 of m is the default"):
        registry.set_traffic("m", "1", 10)
    with pytest.raises(VersionNotFound):
        registry.set_traffic("m", "9", 10)
    assert second.split is None
