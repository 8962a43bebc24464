"""The table of methods whose checkpoints are read."""

from __future__ import annotations

from flambeau.llm.checkpoints.quantization_methods import METHODS
from flambeau.llm.models.hugging_face import QUANTIZATION_METHODS


def test_what_config_json_may_name_can_be_read():
    assert {*METHODS, "flambeau"} == set(QUANTIZATION_METHODS)
