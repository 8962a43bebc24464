from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch

from flambeau.errors import HandlerError
from flambeau.handlers.base import BaseHandler
from flambeau.handlers.labels import load_label_mapping, map_class_to_label


def write(tmp_path, document):
    path = tmp_path / "index_to_name.json"
    path.write_text(json.dumps(document))
    return path


def test_labels_in_every_shape(tmp_path):
    assert load_label_mapping(tmp_path / "missing.json") is None
    assert load_label_mapping(write(tmp_path, {"0": "cat", "1": ["n01", "dog"]})) == {"0": "cat", "1": "dog"}
    assert load_label_mapping(write(tmp_path, {"object_type_names": ["a", "b"]})) == {"0": "a", "1": "b"}
    with pytest.raises(TypeError, match="must hold an object"):
        load_label_mapping(write(tmp_path, ["cat"]))
    with pytest.raises(TypeError, match="must be text"):
        load_label_mapping(write(tmp_path, {"0": 1}))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b'{"0": "cat",\n "1" "dog"}', "line 2, column 6: Expecting ':'"), (b'{"0": "\xff"}', "not UTF-8, byte 7")],
)
def test_broken_file_is_named_with_the_place(tmp_path, content, reason):
    path = tmp_path / "index_to_name.json"
    path.write_bytes(content)
    with pytest.raises(HandlerError, match=f"{re.escape(str(path))} is .*{reason}"):
        load_label_mapping(path)


@pytest.mark.parametrize("names_classes", [False, True])
def test_missing_labels_are_a_warning_where_results_have_names(tmp_path, caplog, names_classes):
    class Plain(BaseHandler):
        def _load(self, folder, model_file):
            return torch.nn.Identity()

    Plain.names_classes = names_classes
    properties = {"model_dir": str(tmp_path), "gpu_id": None}
    context = SimpleNamespace(manifest={}, model_yaml_config={}, system_properties=properties)
    Plain().initialize(context)
    assert ("index_to_name.json is missing" in caplog.text) is names_classes
    write(tmp_path, {"0": "cat"})
    handler = Plain()
    handler.initialize(context)
    assert handler.mapping == {"0": "cat"}


def test_probabilities_get_their_names():
    assert map_class_to_label([[0.1, 0.9]], {"0": "cat", "1": "dog"}) == [{"cat": 0.1, "dog": 0.9}]
    assert map_class_to_label([[0.9]], {"1": "dog"}, [[1]]) == [{"dog": 0.9}]
    assert map_class_to_label([[0.5]]) == [{"0": 0.5}]


def test_class_without_a_label_keeps_its_number():
    assert map_class_to_label([[0.25, 0.75]], {"0": "cat"}) == [{"cat": 0.25, "1": 0.75}]
