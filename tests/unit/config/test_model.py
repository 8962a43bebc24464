from __future__ import annotations

import itertools

import pytest

from flambeau.archive.manifest import BUILT_IN
from flambeau.config.model import HANDLER_NAMES, ModelConfig, read_options
from flambeau.errors import ConfigError
from support.log_records import logged

LOGGER = "flambeau.config.model"


def test_yaml_overrides_what_the_caller_asked_for():
    options = {
        "minWorkers": 2,
        "maxWorkers": 3,
        "batchSize": 4,
        "maxBatchDelay": 0,
        "responseTimeout": 5,
        "clientTimeoutInMills": 250,
        "deviceType": "cpu",
        "deviceIds": [0, 1],
        "mine": {"a": 1},
    }
    config = ModelConfig(min_workers=1, max_workers=1).with_options(options)
    assert (config.min_workers, config.max_workers, config.batch_size) == (2, 3, 4)
    assert (config.batch_delay_s, config.response_timeout_s, config.client_timeout_s) == (0, 5, 0.25)
    assert (config.device_type, config.device_ids) == ("cpu", (0, 1))
    assert config.options["mine"] == {"a": 1}


def test_workers_count_only_as_a_valid_pair():
    config = ModelConfig(min_workers=1, max_workers=1)
    assert config.with_options({"minWorkers": 3}).min_workers == 1
    assert config.with_options({"minWorkers": 3, "maxWorkers": 2}).min_workers == 1


def test_wrong_types_are_warnings(caplog):
    config = ModelConfig().with_options({"batchSize": "many", "deviceType": "tpu", "deviceIds": ["x"]}, "a.yaml")
    assert config.batch_size == 1
    assert config.device_type is None
    batch_size, device_type, device_ids = logged(caplog, LOGGER)
    assert batch_size == ("a.yaml", "batchSize", " of at least 1", "'many'")
    assert (device_type, device_ids) == (("a.yaml", "tpu"), ("a.yaml",))


def test_without_a_delay_nothing_waits_and_describe_shows_the_documented_default():
    assert ModelConfig().batch_delay_s is None
    assert ModelConfig().batch_delay_ms == 0
    assert ModelConfig(batch_delay_s=0.005).batch_delay_ms == 5


def test_a_model_names_an_envelope_or_none():
    assert ModelConfig().envelope is None
    assert ModelConfig().with_options({"envelope": "json"}).envelope == "json"
    assert ModelConfig().with_options({"envelope": "none"}).envelope == ""


def test_ignored_worker_numbers_are_named_in_a_warning(caplog):
    config = ModelConfig(min_workers=4, max_workers=4)
    assert config.with_options({"minWorkers": 3}, "a.yaml of m").min_workers == 4
    assert config.with_options({"maxWorkers": 3}, "b.yaml").max_workers == 4
    assert config.with_options({"minWorkers": 3, "maxWorkers": 2}, "c.yaml").min_workers == 4
    assert logged(caplog, LOGGER) == [
        ("a.yaml of m", "minWorkers", "maxWorkers"),
        ("b.yaml", "maxWorkers", "minWorkers"),
        ("c.yaml",),
    ]


def test_the_minimum_number_of_workers_is_one(caplog):
    config = ModelConfig(min_workers=4, max_workers=4).with_options({"minWorkers": 0, "maxWorkers": 2}, "a.yaml")
    assert (config.min_workers, config.max_workers) == (1, 2)
    assert logged(caplog, LOGGER) == [("a.yaml", 0)]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("batchsize", "batchSize"),
        ("batch_size", "batchSize"),
        ("maxWorker", "maxWorkers"),
        ("deviceId", "deviceIds"),
        ("responseTimeOut", "responseTimeout"),
        ("parallel-level", "parallelLevel"),
        ("jobQueuSize", "jobQueueSize"),
    ],
)
def test_misspelled_keys_are_named_in_a_warning(caplog, key, meant):
    ModelConfig().with_options({key: 1}, "a.yaml")
    assert logged(caplog, LOGGER) == [("a.yaml", key, meant)]


def test_a_section_named_after_a_built_in_handler_is_named_in_a_warning(caplog):
    ModelConfig().with_options({"gpt_handler": {"quantization": "int8"}, "onnx": "1.20"}, "a.yaml")
    assert logged(caplog, LOGGER) == [("a.yaml", "gpt_handler")]
    assert set(HANDLER_NAMES) == BUILT_IN.keys()


def test_keys_of_handlers_are_ignored(caplog):
    free = ("handler", "pt2", "pippy", "deepspeed", "dali", "micro_batching", "max_length", "model_path", "device")
    ModelConfig().with_options({key: {"a": 1} for key in (*free, "batch", "workers", "timeout", "tokenizer", 7)})
    assert not caplog.records


def test_invalid_numbers_leave_the_defaults(caplog):
    options = {
        "batchSize": float("nan"),
        "responseTimeout": float("inf"),
        "maxRetryTimeoutInSec": True,
        "minWorkers": "x",
    }
    config = ModelConfig().with_options(options)
    assert (config.batch_size, config.response_timeout_s, config.max_retry_s) == (1, 120, 300)
    assert {*options} <= {args[1] for args in logged(caplog, LOGGER)}


def test_settings_of_a_configuration_count_when_they_are_above_zero():
    base = ModelConfig(min_workers=2, max_workers=2, response_timeout_s=30)
    said = {"minWorkers": 3, "maxWorkers": 5, "batchSize": 4, "maxBatchDelay": 0, "responseTimeout": -1, "marName": "x"}
    config = base.with_settings(said, workers=True)
    assert (config.min_workers, config.max_workers, config.batch_size) == (3, 5, 4)
    assert (config.batch_delay_s, config.response_timeout_s) == (None, 30)
    assert base.with_settings(said, workers=False).min_workers == 2
    only_low = base.with_settings({"minWorkers": 4}, workers=True)
    assert (only_low.min_workers, only_low.max_workers) == (4, 4)
    only_high = base.with_settings({"maxWorkers": 1}, workers=True)
    assert (only_high.min_workers, only_high.max_workers) == (1, 1)


def test_a_value_that_expands_without_bound_has_a_short_warning(tmp_path, caplog):
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    names = "abcdefghijklm"
    lines += [f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]" for old, new in itertools.pairwise(names)]
    file = tmp_path / "model-config.yaml"
    file.write_text("\n".join([*lines, "batchSize: *m", "deviceIds: *m"]))
    assert ModelConfig().with_options(read_options(file)).batch_size == 1
    assert len(caplog.text) < 1000


def test_enormous_numbers_are_rejected(tmp_path, caplog):
    file = tmp_path / "model-config.yaml"
    file.write_text(f"maxBatchDelay: {10**400}\nbatchSize: 1e300\n")
    assert ModelConfig().with_options(read_options(file)).batch_delay_s is None
    file.write_text(f"maxBatchDelay: {'9' * 5000}\n")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read_options(file)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"minWorkers": 2_000_000_000, "maxWorkers": 2_000_000_000}, ("minWorkers", "maxWorkers")),
        ({"minWorkers": 1, "maxWorkers": 10_001}, ("maxWorkers",)),
        ({"parallelType": "tp", "parallelLevel": 2_000_000_000}, ("parallelLevel",)),
        ({"parallelType": "tp", "torchrun": {"nproc-per-node": 1025}}, ("nproc-per-node",)),
        ({"batchSize": 2.5}, ("batchSize",)),
        ({"jobQueueSize": 0.5}, ("jobQueueSize",)),
    ],
)
def test_numbers_beyond_any_machine_and_fractions_are_ignored_with_a_warning(caplog, options, names):
    config = ModelConfig().with_options(options)
    assert (config.min_workers, config.max_workers, config.batch_size, config.queue_size) == (1, 1, 1, 100)
    assert config.parallel_level in (0, 1)
    told = [name for values in logged(caplog, LOGGER) for name in values]
    assert all(name in told for name in names)


def test_workers_of_config_properties_are_bounded_too(caplog):
    config = ModelConfig().with_settings({"minWorkers": 2_000_000_000}, workers=True)
    assert (config.min_workers, config.max_workers) == (1, 1)
    assert logged(caplog, LOGGER) == [("models in config.properties", 10_000)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"responseTimeout": 0}, "responseTimeout is 0 and has no effect: 120 is used"),
        ({"parallelType": "tp"}, "parallelType tp has no effect: add parallelLevel, or torchrun with nproc-per-node"),
        ({"parallelLevel": 2}, "parallelLevel has no effect without parallelType"),
        ({"torchrun": {"nproc-per-node": 2}}, "torchrun has no effect without parallelType"),
        ({"handler": ["topk: 3"]}, "handler is a list, and no handler reads it; write keys and values below it"),
    ],
)
def test_settings_without_effect_are_named_once_with_the_remedy(caplog, options, words):
    ModelConfig().with_options(options)
    [record] = caplog.records
    assert words in record.getMessage()


@pytest.mark.parametrize(
    "options",
    [
        {"responseTimeout": 5, "sequenceMaxIdleMSec": 0, "handler": "image_classifier"},
        {"parallelType": "tp", "deviceIds": [0, 1], "handler": {"topk": 1}},
        {"parallelType": "custom"},
    ],
)
def test_settings_with_an_effect_are_not_worth_a_warning(caplog, options):
    ModelConfig().with_options(options)
    assert not caplog.records


def test_each_value_has_its_source():
    config = ModelConfig().updated({"queue_size": 7}, "the setting job_queue_size")
    config = config.with_options({"batchSize": 8, "responseTimeout": 9}, "model-config.yaml of digits")
    config = config.updated({"batch_size": 16}, "the register call")
    assert config.origins == {
        "queue_size": "the setting job_queue_size",
        "response_timeout_s": "model-config.yaml",
        "batch_size": "the register call",
    }
    assert config.with_settings({"minWorkers": 2, "maxWorkers": 3}, workers=True).origins["max_workers"] == (
        "models in config.properties"
    )
