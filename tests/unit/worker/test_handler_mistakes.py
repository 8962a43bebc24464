"""The sentences about a handler author's mistakes, without a server."""

from __future__ import annotations

import ast
import functools
import json

import pytest

from flambeau.handlers.envelopes.base import BodyEnvelope
from flambeau.worker.code_places import place_of, source_line
from flambeau.worker.handler_mistakes import (
    explain_exception,
    explain_split,
    explain_training,
    find_training_layer,
    lacks_gpu,
)
from flambeau.worker.inputs import Form
from flambeau.worker.request_mistakes import fields_named, lacking_key
from flambeau.worker.result_mistakes import explain_count, explain_type, explain_value, to_plain


def failure(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


class Plain:
    def initialize(self, context):
        self.ready = True

    def handle(self, data, context):
        return [self.model(row) for row in data]


class BaseHandler:
    """Stands for the real one, which imports torch; it is found by its name."""

    def __init__(self):
        self.model = None
        self.device = None

    def initialize(self, context):
        self.model = len

    def preprocess(self, data):
        return data

    def inference(self, data):
        return self.model(data)

    def postprocess(self, data):
        return [data.tolist()]

    def handle(self, data, context):
        return self.postprocess(self.inference(self.preprocess(data)))


class WithLabels(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        self.mapping, self.initialized = None, True

    def postprocess(self, data):
        return [self.mapping[str(data)]]


def test_labels_that_the_model_does_not_have_are_named():
    handler = WithLabels()
    handler.initialize(None)
    sentence = explain_exception(failure(handler.handle, [{"body": 1}], None))
    assert "self.mapping is None; the model has no index_to_name.json, which sets it" in sentence


def test_both_numbers_are_told():
    assert explain_count(3, 1, "returned").startswith("returned a list of 3 for 1 request, expected 1. ")
    text = explain_count(1, 4, "yielded")
    assert text.startswith("yielded a list of 1 for a batch of 4 requests, expected 4, one for each request")


@pytest.mark.parametrize(
    ("result", "remedy"),
    [
        ({"a": 1}, "Return [result]"),
        ("text", "Return [result]"),
        (None, "return statement"),
        ((1,), "Return list(result)"),
        ({1}, "Return list(result)"),
        (iter([1]), "Return list(result)"),
    ],
)
def test_remedy_fits_the_result(result, remedy):
    assert remedy in explain_type(result, 1, "returned")


def test_batch_is_not_answered_with_one_element():
    assert "expected a list with 4 elements" in explain_type({}, 4, "returned")
    assert "[answer(row) for row in data]" in explain_type({}, 4, "returned")
    assert "one chunk for each row" in explain_type({}, 4, "yielded")


def test_async_results_of_plain_handlers_have_their_remedy():
    async def generator():
        yield 1

    assert "`async def handle`, with `yield`" in explain_type(generator(), 1, "returned")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), "object at result,"),
        ({"a": [1, {"b": object()}]}, "object at result['a'][1]['b'],"),
        ([{(1, 2): 3}], "keys of the type tuple at result[0],"),
    ],
)
def test_value_without_json_is_found(value, path):
    assert path in explain_value(value, TypeError("no"))


def test_value_that_contains_itself_is_explained():
    value = []
    value.append(value)
    sentence = explain_value(value, ValueError("Circular reference detected"))
    assert sentence.startswith("returned a value that contains itself at result, which has no JSON form")


def test_only_arrays_become_lists():
    np = pytest.importorskip("numpy")
    assert to_plain(np.arange(2)) == [0, 1]
    assert to_plain(np.float32(0.5)) == 0.5
    with pytest.raises(TypeError, match="Object of type object"):
        to_plain(object())


def test_place_is_the_function_of_the_author():
    assert place_of(Plain().handle).startswith("handle (test_handler_mistakes.py:")
    assert place_of(functools.wraps(Plain().handle)(lambda *a: None)).startswith("handle (test_handler_mistakes.py:")
    assert place_of(len) == "handle"


@pytest.mark.parametrize(
    "text",
    [
        "Torch not compiled with CUDA enabled",
        "Found no NVIDIA driver on your system. Please check",
        "No CUDA GPUs are available",
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False",
    ],
)
def test_missing_gpu_is_recognized(text):
    assert lacks_gpu(RuntimeError(text))
    assert "this worker has none" in explain_exception(RuntimeError(text))
    assert ("map_location" in explain_exception(RuntimeError(text))) is ("deserialize" in text)


def test_other_errors_of_cuda_are_left_to_their_traceback():
    assert explain_exception(RuntimeError("CUDA error: device-side assert triggered")) == ""


def test_key_that_a_row_lacks_is_named_with_those_it_has():
    def read(row):
        return row["data"]

    text = explain_exception(failure(read, {"body": 1}))
    assert "row has the keys 'body'. A plain body is under 'body'" in text
    form = Form()
    form.update(a=b"1", b=b"2")
    assert "row has the keys 'a', 'b'. A plain body is under 'body'" in explain_exception(failure(read, form))
    assert "row has no keys" in explain_exception(failure(read, {}))
    assert "PredictionException" in explain_exception(failure(read, {"x": 1, "y": 2}))


def test_body_of_another_type_is_named():
    def read(data):
        return [row["body"]["text"] for row in data]

    assert "row['body'] is bytearray 1 B" in explain_exception(failure(read, [{"body": bytearray(b"x")}]))
    assert "row['body'] is str of 1 characters" in explain_exception(failure(read, [{"body": "x"}]))
    assert "row['body'] is list of 2 int, not a dict. Check" in explain_exception(failure(read, [{"body": [1, 2]}]))


def test_body_that_lacks_a_method_is_described():
    def upper(row):
        return row["body"].upper()

    def decode(row):
        return row.get("data").decode()

    text = explain_exception(failure(upper, {"body": {"x": 1}}))
    assert "row['body'] is dict of 1 (x), by the content type of the request. JSON arrives parsed" in text
    assert "row.get('data') is None; row has the keys 'body'" in explain_exception(failure(decode, {"body": 1}))
    assert explain_exception(failure(lambda value: value.upper(), 1)) == ""


def test_json_that_is_parsed_twice_is_explained():
    assert "parsed already and arrives as a dict" in explain_exception(failure(json.loads, {}))


def test_envelope_does_not_hide_the_place():
    assert place_of(BodyEnvelope(Plain().handle).handle).startswith("handle (test_handler_mistakes.py:")


def test_code_of_the_author_is_not_run_again_to_find_the_keys():
    calls = []

    def rows():
        calls.append(1)
        return {"body": 1}

    assert explain_exception(failure(lambda: rows()["data"])) == ""
    assert len(calls) == 1


def test_error_without_a_known_mistake_has_no_sentence():
    assert explain_exception(failure(int, "x")) == ""
    assert explain_exception(failure(lambda: {}.missing)) == ""


def test_attribute_that_nothing_has_set_is_named_with_initialize():
    error = failure(Plain().handle, [1], None)
    text = explain_exception(error)
    assert source_line(error) in text
    assert "initialize (test_handler_mistakes.py:" in text
    assert "did not set it. Write self.model = …" in text


def test_forgotten_super_is_named():
    class NoInitialize(BaseHandler):
        def initialize(self, context):
            self.labels = []

    class NoInit(BaseHandler):
        def __init__(self):
            self.labels = []

        def initialize(self, context):
            super().initialize(context)
            return self.device

    class Good(BaseHandler):
        def initialize(self, context):
            super().initialize(context)
            self.model = None

    text = explain_exception(failure(NoInitialize().handle, [1], None))
    assert "self.model is None; NoInitialize.initialize (test_handler_mistakes.py:" in text
    assert "does not call super().initialize(context), which sets it" in text
    assert "NoInit.__init__ (test_handler_mistakes.py:" in explain_exception(failure(NoInit().initialize, None))
    handler = Good()
    handler.initialize(None)
    assert "did not set it" in explain_exception(failure(handler.handle, [1], None))


def test_stage_that_returns_nothing_is_named():
    class Silent(BaseHandler):
        def inference(self, data):
            len(data)

    text = explain_exception(failure(Silent().handle, [1], None))
    assert text.startswith("inference (test_handler_mistakes.py:")
    assert "returned None, so that postprocess failed" in text


def test_wrong_arguments_are_answered_with_the_signature():
    class Short:
        def handle(self, data): ...

    text = explain_exception(failure(lambda: Short().handle([], None)))
    assert "The server calls handle(self, data, context)" in text


def test_batch_that_runs_again_names_its_exception():
    error = failure(int, "x")
    assert "each of them succeeded alone: ValueError: invalid literal" in explain_split(
        error, 4, "", has_succeeded=True
    )
    assert "run again one by one: as said." in explain_split(error, 4, "as said", has_succeeded=False)


def test_only_layers_that_change_results_are_found_in_training_mode():
    torch = pytest.importorskip("torch")
    nn = torch.nn
    assert find_training_layer(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))) == "Dropout layer '1'"
    assert find_training_layer(nn.BatchNorm2d(1)) == "BatchNorm2d layer"
    with pytest.deprecated_call():
        scripted = torch.jit.script(nn.Sequential(nn.Dropout(0.1)))
    assert find_training_layer(scripted) == "Dropout layer '0'"
    assert find_training_layer(nn.Sequential(nn.Dropout(0.1)).eval()) == ""
    assert find_training_layer(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0))) == ""


def test_model_of_a_handler_in_training_mode_is_named():
    torch = pytest.importorskip("torch")
    handler = Plain()
    handler.network = torch.nn.Dropout(0.5)
    assert "self.network is in training mode after initialize (test_handler_mistakes.py:" in explain_training(
        handler, handler.handle
    )
    handler.network.eval()
    assert explain_training(handler, handler.handle) == ""
    assert explain_training(None, failure) == ""


def test_rows_tell_what_a_body_lacks_where_the_variable_of_a_comprehension_is_gone():
    rows = [{"body": {"a": 1}}, {"data": 2}]
    assert fields_named(ast.parse('row["body"]', mode="eval").body, rows) == [{"a": 1}]
    assert fields_named(ast.parse("settings", mode="eval").body, rows) == []
    data = [{"body": {"b": 1}}]
    with pytest.raises(KeyError) as caught:
        [row["body"]["a"] for row in data]
    assert lacking_key(caught.value) == "the body of the request has no 'a'"
    settings = {"b": 1}
    with pytest.raises(KeyError) as caught:
        settings["a"]
    assert lacking_key(caught.value) == ""
