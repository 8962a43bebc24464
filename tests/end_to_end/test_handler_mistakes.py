"""Mistakes of handler authors: the cause and the log say what was found, what was expected, where, and the remedy."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing

import pytest

from flambeau.cli.run import open_model
from flambeau.wire.messages import Request
from flambeau.worker.failures import explain
from flambeau.worker.local_worker import LocalWorker
from support.running import RunningServer

FUNCTION = "def handle(data, context):\n    if data is None:\n        return None\n"
BASE = "import torch\nfrom flambeau.handlers.base import BaseHandler\n\n\nclass Mine(BaseHandler):\n"
NET = "    def initialize(self, context):\n        self.model = torch.nn.Linear(2, 2).eval()\n"
JSON = "application/json"
INVALID, MISMATCH = "Invalid model predict output", "number of batch response mismatched"
UNSUPPORTED, FAILED = "Unsupported model output data type.", "Prediction failed"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def server(store):
    running = RunningServer(store.parent / "mistakes.log", "--model-store", str(store))
    yield running.wait_ready()
    running.stop(timeout=40)


@pytest.fixture
def register(server, store, request):
    """Register a model with this handler; returns its name and the answer."""
    name = request.node.name.replace("[", "-").strip("]").replace(" ", "_").replace("_", "-")[:80]

    def register_model(source, config="", **files):
        folder = store / name
        folder.mkdir()
        (folder / "handler.py").write_text(source)
        for stem, text in files.items():
            (folder / f"{stem}.py").write_text(text)
        first = "" if "handler:" in config else "handler: handler.py\n"
        (folder / "model-config.yaml").write_text(f"{first}{config}")
        query = f"url={name}&initial_workers=1&synchronous=true"
        return name, server.request("POST", f"/models?{query}", port=server.management_port)

    yield register_model
    server.request("DELETE", f"/models/{name}", port=server.management_port)


def warning(server, model, *keys):
    """The lines of the model's worker with these words; waits until there is one."""
    deadline = time.monotonic() + 20
    while not (found := server.logged(f"-{model}_", *keys)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def returns(value):
    return f"{FUNCTION}    return {value}\n"


@pytest.mark.parametrize(
    ("source", "message", "sentence"),
    [
        pytest.param(
            returns("[1, 2, 3]"),
            MISMATCH,
            "(handler.py:1) returned a list of 3 for 1 request, expected 1. ",
            id="count",
        ),
        pytest.param(returns("{'a': 1}"), INVALID, "returned dict of 1 (a), expected a list with 1", id="dict"),
        pytest.param(returns("'text'"), INVALID, "returned str of 4 characters, expected a list", id="str"),
        pytest.param(returns("None"), INVALID, "returned None, expected a list with 1 element. Is a return", id="none"),
        pytest.param(returns("b'abc'"), INVALID, "returned bytes 3 B, expected a list", id="bytes"),
        pytest.param(
            returns("(1,)"),
            INVALID,
            "tuple of 1 int, expected a list with 1 element. Return",
            id="tuple",
        ),
        pytest.param(
            f"import numpy as np\n{returns('np.zeros((1, 3))')}",
            INVALID,
            "handle (handler.py:2) returned ndarray float64 (1, 3)",
            id="array",
        ),
        pytest.param(returns("[{'a': [1, object()]}]"), UNSUPPORTED, "object at result['a'][1], which", id="object"),
        pytest.param(returns("[{(1, 2): 3}]"), UNSUPPORTED, "keys of the type tuple at result", id="key"),
        pytest.param(
            f"async def work():\n    return [1]\n\n\n{returns('work()')}",
            INVALID,
            "returned coroutine, expected a list with 1 element. Await it",
            id="coroutine",
        ),
        pytest.param(
            returns("[row['data'] for row in data]"),
            FAILED,
            "KeyError: 'data' (handler.py:4): row has the keys 'body'. A plain body is under 'body'",
            id="key of a row",
        ),
        pytest.param(
            returns("[row['body']['text'] for row in data]"),
            FAILED,
            "KeyError: 'text' (handler.py:4): row['body'] has the keys 'txt', 'n'. Did you mean 'txt'? If",
            id="key of a body",
        ),
        pytest.param(
            returns("[row.get('data').decode() for row in data]"),
            FAILED,
            "(handler.py:4): row.get('data') is None; row has the keys 'body'. A plain body",
            id="get",
        ),
        pytest.param(
            "import json\n\n\n" + returns("[json.loads(row['body']) for row in data]"),
            FAILED,
            "a body sent as application/json is parsed already and arrives as a dict",
            id="parsed twice",
        ),
        pytest.param(
            "class Mine:\n    def initialize(self, context): ...\n    def handle(self, data):\n        return data\n",
            FAILED,
            "takes 2 positional arguments but 3 were given (handler.py:3). The server calls handle(self, data, context",
            id="arguments",
        ),
        pytest.param(
            "class Mine:\n    def initialize(self, context):\n        model = 1\n"
            "    def handle(self, data, context):\n        return [self.model]\n",
            FAILED,
            "no attribute 'model' (handler.py:5): initialize (handler.py:2) did not set it. Write self.model = …",
            id="attribute",
        ),
        pytest.param(
            returns("[data['body']]"),
            FAILED,
            "data is a list with one dict for each request, 1 now. Take them one by one: [answer(row) for row in data]",
            id="batch as a dict",
        ),
        pytest.param(
            returns("[data.get('body')]"),
            FAILED,
            "(handler.py:4): data is a list with one dict for each request",
            id="get of a batch",
        ),
        pytest.param(
            "import io\n\n\n" + returns("[io.BytesIO(row['body']).read() for row in data]"),
            FAILED,
            "the type of a body follows from the content type of the request. JSON arrives parsed",
            id="bytes of a parsed body",
        ),
        pytest.param(
            returns("[context.system_properties['gpu']]"),
            FAILED,
            "context.system_properties has the keys 'model_dir', 'gpu_id', 'batch_size'",
            id="key of the context",
        ),
        pytest.param(
            returns("[context.model_nme]"),
            FAILED,
            "no attribute 'model_nme' (handler.py:4): did you mean model_name",
            id="attribute of the context",
        ),
        pytest.param(
            f"{FUNCTION}    context.set_response_content_type('text/html')\n    return [1]\n",
            FAILED,
            "(handler.py:4). Call it as context.set_response_content_type(idx, value)",
            id="arguments of the context",
        ),
        pytest.param(
            f"{FUNCTION}    context.set_response_header(3, 'x-a', 'b')\n    return [1]\n",
            FAILED,
            "(handler.py:4): idx counts the requests of this batch from 0; it has 1.",
            id="index of the context",
        ),
        pytest.param(
            f"{FUNCTION}    raise 'no'\n",
            FAILED,
            "must derive from BaseException (handler.py:4): write raise",
            id="raise",
        ),
        pytest.param(
            "import asyncio\n\n\nclass Mine:\n    def initialize(self, context): ...\n    async def one(self): ...\n"
            "    async def handle(self, data, context):\n        return [asyncio.run(self.one()) for _ in data]\n",
            FAILED,
            "(handler.py:8): `async def handle` runs in an event loop. Await the call",
            id="asyncio.run",
        ),
        pytest.param(
            f"{BASE}    def initialize(self, context):\n        self.initialized = True\n"
            "    def preprocess(self, data):\n        return torch.zeros(1, 2)\n",
            FAILED,
            "self.model is None; Mine.initialize (handler.py:6) does not call super().initialize(context), which sets",
            id="super",
        ),
        pytest.param(
            f"{BASE}{NET}    def preprocess(self, data):\n        return torch.zeros(1, 2)\n"
            "    def postprocess(self, data):\n        return {'scores': data.tolist()}\n",
            INVALID,
            "postprocess (handler.py:10) returned dict of 1 (scores), expected a list",
            id="postprocess",
        ),
    ],
)
def test_mistake_is_explained_in_the_cause_and_in_the_log(server, register, source, message, sentence):
    name, answer = register(source)
    assert answer.status == 200, answer.body
    reply = server.predict(name, b'{"txt": "a", "n": 1}', kind=JSON)
    assert reply.status == 503
    assert reply.json["message"].startswith(message.rstrip("."))
    assert sentence in reply.json["cause"][0]
    assert sentence in server.log


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        pytest.param(
            f"import torch\n{returns('torch.zeros(1, 2)')}",
            "returned Tensor float32 (1, 2) cpu, expected a list with 1 element. Return result.tolist()",
            id="tensor",
        ),
        pytest.param(
            f"{BASE}{NET}    def preprocess(self, data):\n        torch.zeros(1, 2)\n",
            "preprocess (handler.py:8) returned None, so that inference failed: AttributeError",
            id="preprocess",
        ),
        pytest.param(
            f"{BASE}{NET}    async def preprocess(self, data):\n        return torch.zeros(1, 2)\n",
            "'to'. BaseHandler does not await its stages: write `def preprocess` without async",
            id="async preprocess",
            marks=pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning"),
        ),
    ],
)
def test_mistake_with_torch_is_explained(tmp_path, source, sentence):
    """In this process: each worker would import torch."""
    (tmp_path / "handler.py").write_text(source)
    request = Request(0, "0", [("content-type", JSON)], b'{"txt": "a", "n": 1}')
    with (
        open_model(tmp_path / "handler.py", batch_size=1) as load,
        closing(LocalWorker(load)) as worker,
        pytest.raises(Exception) as raised,  # noqa: PT011  (its explanation is looked at)
    ):
        worker.handle([request])
    assert sentence in explain(raised.value)


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_missing_gpu_is_called_that_and_is_no_lack_of_memory(server, register):
    name, _ = register(
        f"import torch\n{returns('[torch.zeros(1).to(chr(99) + chr(117) + chr(100) + chr(97)).tolist()]')}"
    )
    reply = server.predict(name, b"{}", kind=JSON)
    assert (reply.status, reply.json["message"].partition(": ")[0]) == (503, FAILED)
    assert (
        "(handler.py:5): the code asks for a GPU, and this worker has none. Use self.device" in reply.json["cause"][0]
    )
    assert 'context.system_properties["gpu_id"]' in reply.json["cause"][0]


def test_body_that_is_not_parsed_is_explained(server, register):
    name, _ = register(returns("[row['body']['text'] for row in data]"))
    reply = server.predict(name, b"words")
    assert "row['body'] is bytearray 5 B, not a dict: only a body sent as application/json" in reply.json["cause"][0]


def test_exit_in_a_handler_is_named(server, register):
    name, _ = register(f"import sys\n\n\n{FUNCTION}    sys.exit(3)\n")
    reply = server.predict(name, b"{}", kind=JSON)
    assert (reply.status, reply.json["message"]) == (500, "Worker died: exited with code 3")
    assert "the handler called sys.exit(3) (handler.py:7)" in "".join(reply.json["cause"])


def test_interrupt_that_a_handler_raises_is_named_and_its_request_is_not_tried_again(server, register):
    name, _ = register(f"{FUNCTION}    raise KeyboardInterrupt\n")
    reply = server.predict(name, b"{}", kind=JSON)
    assert (reply.status, reply.json["message"]) == (500, "Worker died: exited with code 1")
    assert "the handler raised KeyboardInterrupt (handler.py:4). It ends the worker" in "".join(reply.json["cause"])


def test_child_that_a_handler_forks_answers_no_requests(server, register):
    name, _ = register(f"import os\n\n\n{FUNCTION}    return ['parent' if os.fork() else 'child']\n")
    assert {server.predict(name, b"{}", kind=JSON).body for _ in range(4)} == {b"parent"}
    assert warning(
        server, name, "the handler called os.fork() (handler.py:7), and the child went on as a second worker"
    )


def test_exception_whose_text_cannot_be_made_leaves_the_worker_alive(server, register):
    text = "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\n\n\n"
    name, _ = register(f"{text}{FUNCTION}    raise Odd\n")
    for _ in range(2):
        reply = server.predict(name, b"{}", kind=JSON)
        assert (reply.status, reply.json["message"].partition(":")[0]) == (503, FAILED)
        sentence = "Odd, whose __str__ (handler.py:2) raises ValueError (handler.py:9): let its __str__ return a text"
        assert sentence in reply.json["cause"][0]
    assert server.failure(name) == ""


def test_exception_that_ends_a_thread_is_noticed(server, register):
    thread = "threading.Thread(target=work)"
    name, _ = register(
        "import threading\n\n\ndef work():\n    raise ValueError('in a thread')\n\n\n"
        f"{FUNCTION}    {thread}.start()\n    return ['ok']\n",
        "handler: handler.py:handle\n",
    )
    assert server.predict(name, b"{}", kind=JSON).body == b"ok"
    [line] = warning(server, name, "a thread of the handler ended with ValueError: in a thread (handler.py:5)")
    assert "WARNING: " in line


def test_silent_exit_of_a_handler_is_explained(server, register):
    name, _ = register(f"import os\n\n\n{FUNCTION}    os._exit(3)\n")
    reply = server.predict(name, b"{}", kind=JSON)
    assert (reply.status, reply.json["message"]) == (500, "Worker died: exited with code 3")
    assert "the handler or a library called os._exit" in "".join(reply.json["cause"])


def test_handler_that_does_not_answer_in_time_shows_where_it_is(server, register):
    name, _ = register(f"import time\n\n\n{FUNCTION}    time.sleep(60)\n", "responseTimeout: 1\n")
    reply = server.predict(name, b"{}", kind=JSON)
    assert (reply.status, reply.json["message"]) == (500, "Worker died: no answer within responseTimeout, 1 s")
    assert "raise responseTimeout in model-config.yaml" in reply.json["cause"][1]
    assert 'handler.py", line 7 in handle' in reply.json["cause"][2]


def test_arrays_and_scalars_inside_results_are_numbers(server, register):
    value = "[{'scores': np.arange(3) / 2, 'best': np.int64(2), 'p': np.float32(0.5), 'ok': np.bool_(True)}]"
    name, _ = register(f"import numpy as np\n{returns(value)}")
    reply = server.predict(name, b"{}", kind=JSON)
    assert reply.json == {"scores": [0.0, 0.5, 1.0], "best": 2, "p": 0.5, "ok": True}


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        pytest.param(
            f"{FUNCTION}    if len(data) > 1:\n        raise ValueError('one, please')\n    return ['ok']\n",
            "each of them succeeded alone: ValueError: one, please (handler.py:5). Until the handler",
            id="exception",
        ),
        pytest.param(
            returns("['ok']"),
            "handle (handler.py:1) returned a list of 1 for a batch of 4 requests, expected 4, one for each request",
            id="count",
        ),
        pytest.param(
            f"{FUNCTION}    yield {{'a': 1}}\n",
            "yielded dict of 1 (a), expected a list with 4 elements, one for each request of the batch",
            id="yielded dict",
        ),
    ],
)
def test_handler_that_cannot_batch_is_named_once(server, register, source, sentence):
    name, _ = register(source, "batchSize: 4\nmaxBatchDelay: 5000\n")
    for _ in range(2):
        replies = [call.result() for call in server.at_once(lambda _: server.predict(name, b"{}", kind=JSON), [0] * 4)]
        assert {reply.status for reply in replies} == {200}
    found = warning(server, name, "a batch of 4 requests failed")
    assert len(found) == 1
    assert sentence in found[0]
    assert "set batchSize: 1" in found[0]


@pytest.mark.parametrize("source", ["yield None", "return [(None for _ in range(1))]"])
def test_yielded_none_is_an_error(server, register, source):
    model, reply = register(f"{FUNCTION}    {source}\n")
    assert reply.status == 200, reply.body
    answer = server.predict(model, {"a": 1})
    assert (answer.status, answer.json["message"].startswith(INVALID.rstrip("."))) == (503, True)
    assert "(handler.py:1) yielded None, expected text, bytes or JSON" in answer.json["cause"][0]


def test_yielded_dicts_are_noticed(server, register):
    name, _ = register(f"{FUNCTION}    yield {{'token': 'a'}}\n    yield {{'token': 'b'}}\n")
    assert server.predict(name, b"{}", kind=JSON).status == 200
    assert "handle (handler.py:1) yields dicts" in warning(server, name, "yields dicts")[0]


def test_model_in_training_mode_is_noticed(server, register):
    layers = "torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))"
    name, _ = register(f"{BASE}    def initialize(self, context):\n        self.model = {layers}\n")
    found = warning(server, name, "training mode")
    assert len(found) == 1
    assert "after initialize (handler.py:6): its Dropout layer '1'" in found[0]
    assert "Call self.model.eval()" in found[0]


def test_call_that_blocks_the_event_loop_is_named(server, register):
    name, _ = register(
        "import time\n\n\nclass Mine:\n    def initialize(self, context): ...\n"
        "    async def handle(self, data, context):\n        time.sleep(3)\n        return ['slept' for _ in data]\n"
    )
    assert server.predict(name, b"{}", kind=JSON).body == b"slept"
    found = warning(server, name, "blocks the event loop")
    assert len(found) == 1
    assert "handle (handler.py:7) blocks the event loop for more than 1 s: `time.sleep(3)`" in found[0]
    assert "asyncio.to_thread" in found[0]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        pytest.param(
            "def handle(data, context):\n    return [1 for _ in data]\n",
            "(handler.py:2): the function is called once with data=None when the model is loaded",
            id="first call",
        ),
        pytest.param(
            "import nosuchmodule\n", "No module named 'nosuchmodule' (handler.py:1): it is not installed", id="import"
        ),
        pytest.param(
            "class Mine:\n    def initialize(self): ...\n    def handle(self, data, context): ...\n",
            "The server calls initialize(self, context)",
            id="arguments",
        ),
        pytest.param(
            "class A:\n    def initialize(self, c): ...\n    def handle(self, d, c): ...\n\n\n"
            "class B:\n    def initialize(self, c): ...\n    def handle(self, d, c): ...\n",
            "handler.py has A (line 1), B (line 6). Keep one of them, or name it: handler: handler.py:B",
            id="two classes",
        ),
        pytest.param(
            "def predict(data, context): ...\n",
            "handler.py has no class and no function `handle`; it defines predict. Define one class",
            id="no handle",
        ),
        pytest.param(
            "class Mine:\n    def initialise(self, context): ...\n    def handle(self, data, context): ...\n",
            "Mine.initialise (handler.py:2) is never called: the server knows initialize. Rename it to initialize",
            id="misspelt",
        ),
        pytest.param(
            "class Mine:\n    def initialize(self, context): ...\n    def predict(self, data, context): ...\n",
            "Expect handle method in class Mine: Mine in handler.py has initialize, predict. Define handle(self, data,",
            id="no method",
        ),
        pytest.param(
            "class Mine:\n    def __init__(self, model): ...\n    def initialize(self, context): ...\n"
            "    def handle(self, data, context): ...\n",
            "(handler.py:2). The server calls Mine() without arguments; take what it needs in initialize",
            id="constructor",
        ),
        pytest.param(
            "def handle(data, context)\n    return [1]\n",
            "SyntaxError: expected ':' (handler.py:1, column 26), in `def handle(data, context)`. Correct this line",
            id="syntax",
        ),
        pytest.param(
            "from helper import clean\n",
            "ImportError: helper.py has no 'clean' (handler.py:1); it defines cleen. Did you mean cleen?",
            id="name of a helper",
        ),
        pytest.param(
            "from .helper import clean\n",
            "(handler.py:1): the files of a model are modules of their own, and no package. Write `from helper import",
            id="relative import",
        ),
        pytest.param("X = {}['k']\n", "KeyError: 'k' (handler.py:1)", id="exception"),
        pytest.param(
            "class Mine:\n    def initialize(self, context):\n        open('labels.txt')\n"
            "    def handle(self, data, context): ...\n",
            '--extra-files), and open os.path.join(context.system_properties["model_dir"], "labels.txt")',
            id="file",
        ),
        pytest.param(
            "class Mine:\n    def initialize(self, context):\n        context.model_yaml_config['treshold']\n"
            "    def handle(self, data, context): ...\n",
            "(handler.py:3): context.model_yaml_config has the keys 'handler', 'threshold'. Did you mean 'threshold'?",
            id="key of the configuration",
        ),
        pytest.param(
            "import sys\n\n\nclass Mine:\n    def initialize(self, context):\n        sys.exit('no license')\n"
            "    def handle(self, data, context): ...\n",
            "the handler called sys.exit('no license') (handler.py:6). Raise an exception instead",
            id="exit",
        ),
    ],
)
def test_handler_that_cannot_be_loaded_is_explained(register, source, sentence):
    _, answer = register(source, "threshold: 3\n", helper="def cleen(): ...\n")
    assert answer.status == 500
    assert sentence in answer.json["cause"][0]
    assert sentence not in "".join(answer.json["cause"][1:])  # once


def test_one_of_several_classes_is_chosen_by_its_name(server, register):
    body = "    def initialize(self, context): ...\n    def handle(self, data, context): return [type(self).__name__]\n"
    name, answer = register(f"class A:\n{body}\n\nclass B:\n{body}", "handler: handler.py:A\n")
    assert answer.status == 200, answer.body
    assert server.predict(name, b"{}", kind=JSON).body == b"A"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        pytest.param(
            "class Mine:\n    def initialize(self, context): ...\n    def handle(self, data, context): return [1]\n"
            "    def getInsights(self, data, text, target): ...\n",
            "Mine.getInsights (handler.py:4) is never called: the server knows get_insights",
            id="misspelt hook",
        ),
        pytest.param(returns("[None]"), "returned None for a request, which is sent as `null`", id="none"),
        pytest.param(returns("[{'p': [1.0, float('nan')]}]"), "returned nan at result['p'][…], which JSON", id="nan"),
    ],
)
def test_what_succeeds_and_is_hardly_meant_is_logged(server, register, source, sentence):
    name, answer = register(source)
    assert answer.status == 200, answer.body
    assert server.predict(name, b"{}", kind=JSON).status == 200
    assert len(warning(server, name, sentence)) == 1


def test_file_named_like_a_standard_module_is_noticed(server, register):
    name, _ = register(returns("[1]"), queue="")
    assert warning(server, name, "queue.py in the model's folder has the name of a module of Python's standard library")


def test_swapped_arguments_of_a_chosen_answer_are_noticed(server, register):
    name, _ = register(
        f"from flambeau.errors import PredictionException\n{FUNCTION}    raise PredictionException(400, 'no x')\n"
    )
    reply = server.predict(name, b"{}", kind=JSON)
    assert (reply.status, reply.json["message"]) == (500, "400")
    assert "PredictionException(400, 'no x') (handler.py:5): the status is no number" in reply.json["cause"][0]


def test_yaml_that_cannot_be_parsed_is_shown_with_its_place(register):
    _, answer = register(returns("[1]"), "batchSize: [4\nmaxWorkers: 2\n")
    assert "(line 3, column 11) in `maxWorkers: 2`, while parsing a flow sequence that begins at line 2" in answer.text


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        pytest.param(
            returns("{'a': 1}"),
            "handle (handler.py:1) returned dict of 1 (a), expected a list with 1 element. Return [result]",
            id="result",
        ),
        pytest.param(
            "import time\n\n\nclass Mine:\n    def initialize(self, context): ...\n    def pre_process(self, x): ...\n"
            "    async def handle(self, data, context):\n        time.sleep(1)\n        return {}\n",
            "handle (handler.py:8) blocks the event loop for more than 0.25 s: `time.sleep(1)`",
            id="blocking",
        ),
        pytest.param(
            "class A:\n    def initialize(self, c): ...\n    def handle(self, d, c): ...\n\n\n"
            "class B:\n    def initialize(self, c): ...\n    def handle(self, d, c): ...\n",
            "✗ loads: Expected only one class in custom service code or a function entry point: handler.py has A (",
            id="classes",
        ),
        pytest.param(
            "class Mine:\n    def initialise(self, context): ...\n    def initialize(self, context): ...\n"
            "    def handle(self, data): ...\n    def describeHandle(self): ...\n",
            "· warning: Mine.describeHandle (handler.py:5) is never called: the server knows describe_handle",
            id="hook",
        ),
        pytest.param(
            "def handle(:\n", "SyntaxError: invalid syntax (handler.py:1, column 12), in `def handle(:`", id="syntax"
        ),
    ],
)
def test_check_says_the_same_as_the_server(tmp_path, source, sentence):
    (tmp_path / "handler.py").write_text(source)
    (tmp_path / "sample.json").write_text("{}")
    words = ["check", tmp_path / "handler.py", "--samples", tmp_path / "sample.json"]
    command = [sys.executable, "-m", "flambeau.cli.main", *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert sentence in result.stdout
    assert result.returncode == 1


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ([], "is empty; a model folder has a handler.py, or a model-config.yaml"),
        (["mine.py", "other.py"], "holds mine.py, other.py, but no handler.py; rename the one with the handler"),
        (["a.pth", "b.pth"], "holds a.pth, b.pth, but no handler.py; write handler: base_handler"),
        (["notes.txt"], "holds notes.txt, but no handler.py; a model folder has a handler.py"),
    ],
)
def test_folder_that_is_no_model_is_explained(start, tmp_path, files, sentence):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in files:
        (folder / name).write_text("")
    server = start(folder).wait_ready()
    assert server.logged(sentence, level="WARNING")


def test_handler_that_the_model_config_names_is_the_one_that_is_used(start, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "handler.py").write_text(returns("['handler.py']"))
    (folder / "other.py").write_text(returns("['other.py']"))
    (folder / "model-config.yaml").write_text("handler: other.py\n")
    server = start(folder).wait_ready()
    assert server.predict("model", b"{}", kind=JSON).body == b"other.py"


def test_handler_that_is_misspelt_is_answered_with_the_files_there_are(start, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "handler.py").write_text(returns("[1]"))
    (folder / "model-config.yaml").write_text("handler: handlr.py\n")
    server = start(folder).wait_started()
    keys = ("no handler 'handlr'", "The model has handler.py. Built in:")
    deadline = time.monotonic() + 20
    while not server.logged(*keys) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.logged(*keys, level="ERROR")
