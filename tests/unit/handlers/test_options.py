"""The handler section of a model-config.yaml."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from flambeau.errors import HandlerError
from flambeau.handlers.options import (
    HandlerOptions,
    check_options,
    handler_options,
    read_count,
    read_flag,
    read_handler_options,
    read_number,
    resolve_model_path,
    warn_of_misspelled_keys,
)
from flambeau.worker.context import Context

KNOWN = {"model_path": str, "allow_nan": bool, "max_texts": int}


def read(section):
    return read_handler_options(Context("m", ".", None, 1, None, "0", model_yaml_config={"handler": section}), KNOWN)


def test_options_are_read_and_have_defaults():
    options = read({"max_texts": 3})
    assert options.get("max_texts", 5) == 3
    assert options.get("allow_nan", False) is False
    assert read(None).get("model_path") is None


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"max_text": 3}, "model-config.yaml: max_text; known: model_path, allow_nan, max_texts"),
        ({"max_texts": 0}, "max_texts in the handler section must be a whole number of at least 1, not 0"),
        ({"max_texts": True}, "whole number"),
        ({"allow_nan": 1}, "true or false"),
        ({"model_path": 1}, "text"),
        (["max_texts"], "must hold keys and values"),
    ],
)
def test_wrong_options_are_named(section, reason):
    with pytest.raises(HandlerError, match=reason):
        read(section)


def test_paths_begin_at_the_models_folder():
    folder = Path("/models/minilm")
    assert resolve_model_path(folder, None) == folder
    assert resolve_model_path(folder, "weights") == folder / "weights"
    assert resolve_model_path(folder, "/else/where") == Path("/else/where")


@pytest.mark.parametrize(("place", "module"), [(0, "embedding.handler"), (1, "onnx.handler")])
def test_options_in_the_docs_are_those_of_the_handlers(place, module):
    pytest.importorskip("numpy")
    pytest.importorskip("onnxruntime")
    text = (Path(__file__).parents[3] / "docs" / "embeddings-and-onnx.md").read_text()
    documented = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[place])["handler"]
    known = importlib.import_module(f"flambeau.handlers.{module}").OPTIONS
    HandlerOptions(documented, known)
    assert documented.keys() == known.keys()


@pytest.mark.parametrize("config", [None, {}, {"handler": None}, {"handler": "text"}])
def test_no_section_is_an_empty_one(config):
    assert handler_options(config) == {}


def test_values_are_read_or_defaulted():
    options = handler_options({"handler": {"topk": 2, "threshold": 1, "weights_only": False}})
    assert read_count(options, "topk", 5) == 2
    assert read_count({}, "topk", 5) == 5
    assert read_number(options, "threshold", 0.5) == 1
    assert read_flag(options, "weights_only", True) is False


@pytest.mark.parametrize(
    ("read", "value"), [(read_count, 0), (read_count, True), (read_count, 2.5), (read_number, "1"), (read_flag, 1)]
)
def test_wrong_values_are_named(read, value):
    with pytest.raises(HandlerError, match="handler: name must be"):
        read({"name": value}, "name", 1)


@pytest.mark.parametrize(
    ("key", "is_own", "hint"),
    [
        ("topkk", False, "did you mean topk?"),
        ("topkk", True, "did you mean topk?"),
        ("other", False, "it reads topk, profile"),
    ],
)
def test_key_that_a_built_in_handler_does_not_read_is_named(caplog, key, is_own, hint):
    config = {"handler": {key: 3, "name": "image_classifier"}}
    if key == "topkk" and not is_own:
        with pytest.raises(HandlerError, match=re.escape(f"has {key}, which ImageClassifier does not read; {hint}")):
            check_options(config, ("topk",), "ImageClassifier", is_own=is_own)
        return
    check_options(config, ("topk",), "ImageClassifier", is_own=is_own)
    [text] = [record.getMessage() for record in caplog.records]
    assert f"has {key}, which" in text
    assert text.endswith(hint)


def test_key_of_a_subclass_is_its_own(caplog):
    check_options({"handler": {"other": 3, "topk": 1, "profile": True}}, ("topk",), "Own", is_own=True)
    assert not caplog.records


@pytest.mark.parametrize(("key", "meant"), [("PT_2", "pt2"), ("p2", "pt2"), ("weight_only", "weights_only")])
def test_key_beside_the_section_that_is_nearly_a_known_one_is_named(caplog, key, meant):
    warn_of_misspelled_keys({key: 1, "minWorkers": 1, "own": 2})
    assert [record.args for record in caplog.records] == [(key, meant)]


def test_section_that_is_a_list_is_rejected():
    with pytest.raises(HandlerError, match=r"handler in model-config\.yaml must hold keys and values"):
        handler_options({"handler": ["topk: 3"]})
