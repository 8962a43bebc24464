"""The names that handlers written for TorchServe import."""

from __future__ import annotations

import importlib
import types

import pytest

NAMES = {
    "torch_handler.vision_handler": ["VisionHandler"],
    "torch_handler.image_classifier": ["ImageClassifier"],
    "torch_handler.image_segmenter": ["ImageSegmenter"],
    "torch_handler.object_detector": ["ObjectDetector"],
    "torch_handler.text_handler": ["TextHandler"],
    "torch_handler.text_classifier": ["TextClassifier"],
    "torch_handler.contractions": ["CONTRACTION_MAP"],
    "torch_handler.densenet_handler": ["DenseNetHandler"],
    "torch_handler.request_envelope.base": ["BaseEnvelope"],
    "torch_handler.request_envelope.body": ["BodyEnvelope"],
    "torch_handler.request_envelope.json": ["JSONEnvelope"],
    "torch_handler.request_envelope.kserve": ["KServeEnvelope"],
    "torch_handler.request_envelope.kservev2": ["KServev2Envelope"],
    "handler_utils.micro_batching": ["HANDLER_METHODS", "MicroBatching", "WorkerThread", "execute_call"],
    "handler_utils.text_utils": ["get_tokenizer", "ngrams_iterator"],
    "utils.util": [
        "CLEANUP_REGEX",
        "PredictionException",
        "deprecated",
        "get_yaml_config",
        "list_classes_from_module",
        "load_label_mapping",
        "map_class_to_label",
    ],
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_name_is_where_handlers_look_for_it(module, name):
    assert hasattr(importlib.import_module(f"ts.{module}"), name)


def test_classes_of_a_module_are_those_it_defines():
    from ts.utils.util import list_classes_from_module

    module = types.ModuleType("made")
    exec("class A: pass\nclass B(A): pass\nfrom collections import OrderedDict", vars(module))
    assert list_classes_from_module(module) == [module.A, module.B]
    assert list_classes_from_module(module, module.B) == [module.B]


def test_deprecated_functions_warn_at_each_call():
    from ts.utils.util import deprecated

    @deprecated(version="1.0", replacement="newer")
    def old(number):
        return number

    for _ in range(2):
        with pytest.warns(PendingDeprecationWarning, match=r"old is deprecated in 1.0 and moved to newer"):
            assert old(3) == 3


def test_yaml_is_read_and_prediction_exceptions_tell_their_code(tmp_path):
    from ts.utils.util import CLEANUP_REGEX, PredictionException, get_yaml_config

    (tmp_path / "a.yaml").write_text("a: [1]\n")
    assert get_yaml_config(tmp_path / "a.yaml") == {"a": [1]}
    assert str(PredictionException("not here", 404)) == "not here : 404"
    assert CLEANUP_REGEX.sub("", "<b>a</b>&amp;") == "a"
