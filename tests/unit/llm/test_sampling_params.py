"""SamplingParams and the table of its fields."""

from __future__ import annotations

import pytest

from flambeau.llm.errors import InvalidRequest
from flambeau.llm.sampling_params import SAMPLING_FIELDS, SamplingParams


def test_every_field_is_documented_and_has_its_default():
    params = SamplingParams()
    for name, field in SAMPLING_FIELDS.items():
        assert getattr(params, name) == field.default
        assert field.doc.endswith(".")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1, not 0"),
        ({"max_tokens": True}, "max_tokens must be a whole number from 1, not True"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens \\(4\\), not 5"),
        ({"temperature": -1}, "temperature must be a number from 0 to 100, not -1"),
        ({"temperature": None}, "temperature must be a number from 0 to 100, not None"),
        ({"temperature": float("nan")}, "temperature must be a number from 0 to 100, not nan"),
        ({"top_k": 1.5}, "top_k must be a whole number from 0 \\(0: all\\), not 1.5"),
        ({"top_p": 0}, "top_p must be a number above 0, up to 1, not 0"),
        ({"seed": 2**64}, "seed must be a 64-bit number"),
        ({"n": 129}, "n must be a whole number from 1 to 128, not 129"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20, not 21"),
        ({"stop": [""]}, "stop must be texts that are not empty"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be token ids"),
        ({"logit_bias": {1: 101}}, "logit_bias must be token ids with numbers from -100 to 100"),
    ],
)
def test_an_invalid_value_is_named_with_its_limits(given, reason):
    with pytest.raises(InvalidRequest, match=reason) as found:
        SamplingParams(**given)
    assert found.value.parameter in given


def test_limits_are_inclusive():
    SamplingParams(temperature=0, top_p=1, n=128, seed=2**64 - 1, logprobs=0, min_tokens=3, max_tokens=3)
    SamplingParams(temperature=100, seed=-(2**63), logit_bias={0: -100, 1: 100})
