from __future__ import annotations

import json
import math
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.worker.context import Context, RequestProcessor
from flambeau.worker.results import BadResult, check_result, stream_goes_on, to_body, to_json, to_part

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.floats() | st.booleans(), inner),
    max_leaves=20,
)


@given(JSON)
def test_json_is_byte_for_byte_that_of_the_standard_library(value):
    assert to_json(value) == json.dumps(value, indent=2).encode()


@pytest.mark.parametrize(
    "value",
    [
        1e16,
        1e-4,
        9.9e-5,
        -1e-5,
        1e-7,
        -0.0,
        2**70,
        math.nan,
        math.inf,
        {math.inf: 1, -math.inf: 2},
        {math.nan: 1},
        [],
        {},
        "\x7f",
        "é",
        {"a": [], "b": {}},
        (1, 2),
        None,
        True,
    ],
)
def test_special_values_are_those_of_the_standard_library_too(value):
    assert to_json(value) == json.dumps(value, indent=2).encode()


@pytest.mark.parametrize("value", [object(), {"a": object()}, b"x".hex])
def test_values_that_are_not_json_are_rejected(value):
    with pytest.raises(BadResult, match=r"Unsupported model output data type\."):
        to_body(value)


def test_common_types_that_the_standard_library_rejects_are_encoded():
    assert json.loads(to_body({"when": datetime(2024, 1, 2, 3, 4, 5), "set": {1}})) == {
        "when": "2024-01-02T03:04:05",
        "set": [1],
    }


def test_bytes_and_text_are_sent_as_they_are():
    assert to_body(b"\x00") == b"\x00"
    assert to_body(bytearray(b"x")) == b"x"
    assert to_body("ü") == "ü".encode()


def test_result_must_be_a_list_with_one_element_per_request():
    assert check_result([1, 2], 2) == [1, 2]
    with pytest.raises(BadResult, match="Invalid model predict output"):
        check_result((1, 2), 2)
    with pytest.raises(BadResult, match="number of batch response mismatched"):
        check_result([1], 2)


def test_stopping_criteria_decide_whether_a_stream_continues():
    context = Context("m", ".", None, 3, None, "1")
    assert stream_goes_on(context, 0, "x") is None
    context.stopping_criteria = [lambda value: True, lambda value: False, lambda value: None]
    assert [stream_goes_on(context, i, "x") for i in range(3)] == [False, True, None]


def test_stream_header_is_left_to_the_server():
    processor = RequestProcessor({})
    processor.add_response_property("ts_stream_next", "true")
    processor.add_response_property("X-A", "b")
    assert to_part(1, b"", processor, last=True).headers == [("X-A", "b")]


@pytest.mark.parametrize("status", [-5, 0, 99, 100, 101, 199, 1000, 10**30, "x", None])
def test_status_outside_200_to_999_is_rejected(status):
    processor = RequestProcessor({})
    processor.report_status(status)
    with pytest.raises(BadResult, match=f"the status {str(status)[:20]}; it must be a number from 200 to 999"):
        to_part(1, b"", processor, last=True)


def test_headers_with_invalid_names_are_left_out(caplog):
    processor = RequestProcessor({})
    names = ("transfer-encoding ", "a:b", "", "x\r\ny", "é", "a b")
    for name in names:
        processor.add_response_property(name, "chunked")
    processor.add_response_property("X-Fine_1", "kept")
    assert to_part(1, b"", processor, last=True).headers == [("X-Fine_1", "kept")]
    texts = [record.getMessage() for record in caplog.records]
    assert [f"{name!r} is no valid name" in text for name, text in zip(names, texts, strict=True)] == [True] * len(
        names
    )


def test_arrays_and_tensors_inside_a_result_are_lists():
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    value = {"a": np.arange(2), "b": torch.tensor([0.5]), "c": np.float32(0.5), "d": np.bool_(True), "e": float("nan")}
    for number in (0.0, float("nan")):  # through both encoders
        document = json.loads(to_json(value | {"e": number}))
        document.pop("e")
        assert document == {"a": [0, 1], "b": [0.5], "c": 0.5, "d": True}


def test_element_without_json_is_found_by_its_path():
    with pytest.raises(BadResult) as caught:
        to_json({"a": [1, object()]})
    assert "object at result['a'][1]" in caught.value.advice


def test_both_numbers_of_a_wrong_count_are_named():
    with pytest.raises(BadResult) as caught:
        check_result([1], 4)
    assert caught.value.advice.startswith("returned a list of 1 for a batch of 4 requests, expected 4")
