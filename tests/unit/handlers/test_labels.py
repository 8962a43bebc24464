from __future__ import annotations

import json

import pytest

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


def test_probabilities_get_their_names():
    assert map_class_to_label([[0.1, 0.9]], {"0": "cat", "1": "dog"}) == [{"cat": 0.1, "dog": 0.9}]
    assert map_class_to_label([[0.9]], {"1": "dog"}, [[1]]) == [{"dog": 0.9}]
    assert map_class_to_label([[0.5]]) == [{"0": 0.5}]


def test_class_without_a_label_keeps_its_number():
    assert map_class_to_label([[0.25, 0.75]], {"0": "cat"}) == [{"cat": 0.25, "1": 0.75}]
