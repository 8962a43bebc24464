"""The limits of keys in their file."""

from __future__ import annotations

import json
import time

import pytest

from flambeau.config.server import KeysConfig
from flambeau.errors import ConfigError, InvalidKey
from flambeau.frontend.authorization import LOOK_S, Keys
from flambeau.frontend.key_file import limits_document, read_limits, write_private
from flambeau.serving.job import LOW
from flambeau.serving.tenants import KeyLimits
from support.log_records import logged

ANN = "a" * 40
ALL = {
    "requests_per_minute": 60,
    "tokens_per_minute": 1000,
    "max_concurrent": 4,
    "models": ["m"],
    "priority": "low",
    "weight": 2.5,
}


def test_limits_survive_the_file():
    limits = read_limits(ALL)
    assert limits == KeyLimits(
        requests_per_minute=60, tokens_per_minute=1000, max_concurrent=4, models=("m",), priority=LOW, weight=2.5
    )
    assert limits_document(limits) == ALL
    assert limits_document(read_limits({})) == {}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "no object"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"tokens_per_minute": "9"}, "tokens_per_minute"),
        ({"max_concurrent": True}, "max_concurrent"),
        ({"models": "m"}, "models"),
        ({"priority": "urgent"}, "priority"),
        ({"weight": 0}, "weight"),
        ({"request_per_minute": 9}, "no limit 'request_per_minute'"),
    ],
)
def test_invalid_limits_are_named(document, words):
    with pytest.raises(ConfigError, match=words):
        read_limits(document)


def test_key_of_a_user_opens_the_api_with_its_limits(tmp_path, caplog):
    clock = [0.0]
    file = tmp_path / "key_file.json"
    keys = Keys(KeysConfig(file=file), {}, lambda: clock[0])
    document = json.loads(file.read_text())
    entry = {"key": ANN, "api": "inference", "limits": {"requests_per_minute": 1}}
    write_private(file, {**document, "ann": entry})
    clock[0] += LOOK_S
    tenant = keys.check("inference", f"Bearer {ANN}")
    assert (tenant.name, tenant.limits.requests_per_minute) == ("ann", 1)
    tenant.admit("m", 0, time.monotonic())
    [found] = [key for key in keys.describe() if key["name"] == "ann"]
    assert (found["requests"], found["limits"]) == (1, {"requests_per_minute": 1})
    assert ANN not in json.dumps(keys.describe())
    write_private(file, {**document, "ann": {**entry, "limits": {"requests_per_minute": -1}}})
    clock[0] += LOOK_S
    with pytest.raises(InvalidKey):
        keys.check("inference", f"Bearer {ANN}")
    assert logged(caplog, "flambeau.frontend.key_file")[0][0] == "ann"
