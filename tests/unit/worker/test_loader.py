from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from flambeau.errors import HandlerError
from flambeau.handlers.envelopes.base import JSONEnvelope
from flambeau.worker.context import Context
from flambeau.worker.loader import find_envelope, load_handler


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    before = {**sys.modules}
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
            sys.modules.update({name: before[name]} if name in before else {})


@pytest.fixture
def load(tmp_path):
    loop = asyncio.new_event_loop()

    def load(source: str, value: str = "mine.py"):
        (tmp_path / "mine.py").write_text(source)
        return load_handler(value, tmp_path, Context("m", str(tmp_path), None, 1, None, "1"), loop)

    yield load
    loop.close()


HANDLER = "class Mine:\n    def initialize(self, c): pass\n    def handle(self, data, c): return ['mine']\n"


@pytest.fixture
def _without_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_collector")
def test_collector_of_a_worker_begins_after_the_imports_and_leaves_them_out(load):
    source = "import gc\n\nwhile_imported = gc.isenabled()\n\n\ndef handle(data, context):\n    return gc.isenabled()\n"
    frozen_before = gc.get_freeze_count()
    handle = load(source).handle
    assert handle.__globals__["while_imported"] is False
    assert handle(None, None) is True
    assert gc.get_freeze_count() > frozen_before
    assert not any(each is handle.__globals__ for each in gc.get_objects())


def test_collector_that_runs_is_left_alone(load):
    frozen_before = gc.get_freeze_count()
    load(HANDLER)
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen_before  # of those, some may have been freed


def test_only_class_is_the_handler(load):
    assert load(HANDLER).handle([{}], None) == ["mine"]
    assert load(HANDLER, "some/where/mine.py").handle([{}], None) == ["mine"]
    assert load(HANDLER, "mine").handle([{}], None) == ["mine"]


def test_of_a_path_outside_the_model_only_the_name_counts(load, tmp_path):
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "mine.py").write_text(HANDLER.replace("'mine'", "'theirs'"))
    assert load(HANDLER, f"{outside}/mine.py").handle([{}], None) == ["mine"]
    assert load(HANDLER, f"../{outside.name}/mine.py").handle([{}], None) == ["mine"]


def test_function_handle_wins_over_a_class(load):
    entry = load(HANDLER + "def handle(data, c): return data and ['function']\n")
    assert entry.handle([{}], None) == ["function"]


def test_named_function_is_used_and_initialized_with_none(load):
    entry = load("calls = []\ndef go(data, c):\n    calls.append(data)\n    return calls\n", "mine.py:go")
    assert entry.handle([{}], None) == [None, [{}]]


def test_helper_classes_beside_the_handler_do_no_harm(load):
    assert load("class Helper: pass\n" + HANDLER).handle([{}], None) == ["mine"]


def test_base_and_specialization_in_one_file(load):
    source = HANDLER + "class Special(Mine):\n    def handle(self, data, c): return ['special']\n"
    assert load(source).handle([{}], None) == ["special"]


def test_two_handlers_in_one_file_are_rejected(load):
    with pytest.raises(ValueError, match="Expected only one class in custom service code"):
        load(HANDLER + HANDLER.replace("Mine", "Other"))


def test_class_without_handle_is_reported(load):
    with pytest.raises(ValueError, match="Expect handle method in class Mine"):
        load("class Mine: pass\n")


def test_import_error_inside_the_handler_is_reported_as_it_is(load):
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load("import not_installed_anywhere\n")


def test_unknown_handler_names_the_built_in_ones(load):
    with pytest.raises(HandlerError, match=r"no handler 'no_such_handler'.*base_handler"):
        load(HANDLER, "no_such_handler")


def test_missing_function_names_what_is_there(load):
    with pytest.raises(HandlerError, match=r"no function 'go'.*it defines handle_it"):
        load("def handle_it(data, c): pass\n", "mine:go")


def test_handler_may_have_the_name_of_a_module_that_is_loaded_already(load, tmp_path):
    (tmp_path / "json.py").write_text(HANDLER)
    assert load(HANDLER, "json.py").handle([{}], None) == ["mine"]


def test_async_handlers_and_initializers_are_awaited(load):
    source = (
        "class Mine:\n    async def initialize(self, c): self.ready = True\n"
        "    async def handle(self, data, c): return [self.ready]\n"
    )
    entry = load(source)
    assert entry.is_concurrent


def test_handler_in_a_folder_of_the_archive_finds_its_neighbors(load, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "src" / "deep.py").write_text("import beside\ndef entry(data, c): return data and [beside.NAME]\n")
    assert load("", "src/deep.py:entry").handle([{}], None) == ["beside"]
    assert load("", "src/deep:entry").handle([{}], None) == ["beside"]


def test_model_without_a_handler_is_rejected_with_the_places_to_name_one(load):
    with pytest.raises(HandlerError, match=r"names no handler: set model.handler in its manifest"):
        load(HANDLER, "")


def test_missing_function_is_reported_in_torchserves_words(load):
    with pytest.raises(ValueError, match=r"^Expected only one class in custom service code or a function entry point"):
        load("def handle_it(data, c): pass\n", "mine:go")


def test_module_without_a_class_of_its_own_may_re_export_one(load, tmp_path):
    (tmp_path / "theirs.py").write_text(HANDLER)
    assert load("from theirs import Mine\n").handle([{}], None) == ["mine"]
    with pytest.raises(HandlerError, match=r"mine\.py has no class and no function `handle`; it defines nothing"):
        load("from flambeau.handlers.base import BaseHandler\n")


def test_built_in_envelopes_go_by_their_names(tmp_path):
    assert find_envelope("json", tmp_path) is JSONEnvelope


def test_first_class_of_the_models_own_file_is_used(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from ts.torch_handler.request_envelope.base import BaseEnvelope\n"
        "class Helper: pass\nclass First(BaseEnvelope): pass\nclass Second(BaseEnvelope): pass\n"
    )
    assert find_envelope("mine", tmp_path).__name__ == "First"


def test_installed_module_is_found(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "installed_envelope.py").write_text("class E:\n    def handle(self, d, c): pass\n")
    sys.path.insert(0, str(tmp_path / "elsewhere"))
    assert find_envelope("installed_envelope", tmp_path).__name__ == "E"


def test_error_inside_an_envelope_is_not_hidden(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "broken_envelope.py").write_text("import not_there_at_all\n")
    sys.path.insert(0, str(tmp_path / "elsewhere"))
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        find_envelope("broken_envelope", tmp_path)


def test_unknown_envelope_names_the_known_ones(tmp_path):
    with pytest.raises(HandlerError, match="Built in: body, json, kserve, kservev2"):
        find_envelope("nosuch", tmp_path)
    (tmp_path / "bare.py").write_text("")
    with pytest.raises(HandlerError, match="no class"):
        find_envelope("bare", tmp_path)


class Replies:
    """The part of a context that a function of one argument needs."""

    def __init__(self):
        self.types = {}

    def set_response_content_type(self, i, kind):
        self.types[i] = kind


@pytest.mark.parametrize("source", ["def handle(body):", "def words(body):", "def _own(): pass\ndef count(body, /):"])
def test_function_of_one_argument_gets_each_body(load, source):
    loaded = load(f"{source}\n    return body if body == 'text' else {{'got': body}}\n")
    context = Replies()
    rows = [{"body": [1]}, {"data": 2}, {"field": 3}, {"body": "text"}]
    assert loaded.handle(rows, context) == [{"got": [1]}, {"got": 2}, {"got": {"field": 3}}, "text"]
    assert context.types == dict.fromkeys((0, 1, 2), "application/json")


def test_generators_and_coroutines_of_one_argument(load):
    loaded = load("def handle(body):\n    yield from body\n")
    assert [*loaded.handle([{"body": "ab"}], Replies())] == [["a"], ["b"]]
    with pytest.raises(HandlerError, match=r"streams to one request, not to 2; set batchSize: 1"):
        next(loaded.handle([{}, {}], Replies()))
    loaded = load("async def handle(body):\n    return body\n")
    assert loaded.is_concurrent
    assert asyncio.run(loaded.handle([{"body": "a"}], Replies())) == ["a"]

    loaded = load("async def handle(body):\n    for c in body:\n        yield c\n")
    assert loaded.is_concurrent

    async def parts():
        return [part async for part in loaded.handle([{"body": "ab"}], Replies())]

    assert asyncio.run(parts()) == [["a"], ["b"]]


WRAPPED = """
import functools

def shout(function):
    @functools.wraps(function)
    def inner(*arguments):
        return function(*arguments).upper()
    return inner

@shout
def handle(body):
    return body
"""


def test_decorated_function_and_one_that_is_wrapped_already(load):
    assert load(WRAPPED).handle([{"body": "a"}], Replies()) == ["A"]
    source = "from flambeau.worker.loader import per_request\n@per_request\ndef handle(body):\n    return body * 2\n"
    assert load(source).handle([{"body": "a"}], Replies()) == ["aa"]


@pytest.mark.parametrize("source", ["def a(body): pass\ndef b(body): pass\n", "def a(): pass\n", "def a(x, y): pass\n"])
def test_other_functions_are_no_handler(load, source):
    with pytest.raises(HandlerError, match="Expected only one class in custom service code or a function entry point"):
        load(source)


def test_second_argument_with_a_default_is_the_context(load):
    assert load("def handle(data, context=None):\n    return data and [context]\n").handle([{}], "c") == ["c"]
