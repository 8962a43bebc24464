"""gpt_handler on a real server, with a tiny model: requests, streams, clients that vanish, commands, ranks."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

import pytest
import yaml

from flambeau.archive.pack import Recipe, pack
from flambeau.examples.storyteller import FOLDER as STORYTELLER
from support.command import Command
from support.cpu_kernels import need_cpu_kernels
from support.language_models import CONTEXT, ONE_THREAD, write_language_model
from support.running import RunningServer
from support.streams import Stream

GREEDY = {"compile": False, "temperature": 0, "max_new_tokens": 12, "num_blocks": 200}
PROMPT = "To be, or not"
LOADS_S = 90
EVENTS = {"Accept": "text/event-stream"}


def write_model(folder: Path, checkpoint: Path, config=None, **handler) -> Path:
    """A model folder that names the checkpoint."""
    folder.mkdir()
    options = {"handler": {"name": "gpt_handler", "model_path": str(checkpoint), **GREEDY, **handler}, **(config or {})}
    (folder / "model-config.yaml").write_text(yaml.safe_dump(options))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_language_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def server(tmp_path_factory, checkpoint):
    folder = tmp_path_factory.mktemp("served")
    server = RunningServer(folder / "log", str(write_model(folder / "gpt", checkpoint)), env=ONE_THREAD)
    server.start_timeout_s = LOADS_S
    yield server.wait_ready()
    assert customized(server)["blocks_used"] == 0
    server.stop()


def customized(server):
    return server.manage("GET", "/models/gpt?customized=true").json[0]["customizedMetadata"]


@pytest.fixture(scope="module")
def text(server):
    """What the model makes of the prompt."""
    reply = server.predict("gpt", {"data": PROMPT})
    assert reply.headers["content-type"] == "application/json"
    [(key, text)] = reply.json.items()
    assert (key, text[: len(PROMPT)]) == ("generated_text", PROMPT)
    return text[len(PROMPT) :]


def test_a_prediction_is_held_to_a_form(server):
    def ask(**fields):
        return server.predict("gpt", {"prompt": PROMPT, "return_full_text": False, "max_new_tokens": 40, **fields})

    assert ask(guided_choice=["yes", "no"]).json["generated_text"] in ("yes", "no")
    assert ask(response_format={"type": "json_schema", "json_schema": {"schema": {"const": 7}}}).json == {
        "generated_text": "7"
    }
    assert ask(structured_outputs={"regex": "[ab]{3}c"}).json["generated_text"][3] == "c"
    form = urlencode({"data": PROMPT, "guided_json": '{"enum": [null]}', "return_full_text": "false"}).encode()
    reply = server.predict("gpt", form, kind="application/x-www-form-urlencoded")
    assert reply.json == {"generated_text": "null"}
    refused = ask(guided_json={"items": {"not": {}}})
    assert (refused.status, "/items/not" in refused.text) == (400, True)
    assert ask(guided_jsno={}).status == 400
    assert ask(guided_regex="a", guided_choice=["a"]).status == 400


def test_prompt_may_come_in_every_form(server, text):
    whole = {"generated_text": PROMPT + text}
    form = urlencode({"data": PROMPT, "max_new_tokens": 12}).encode()
    bodies = [
        ({"prompt": PROMPT}, None),
        (PROMPT.encode(), "text/plain"),
        (PROMPT.encode(), "application/octet-stream"),
        (json.dumps({"prompt": PROMPT}).encode(), "application/octet-stream"),
        (form, "application/x-www-form-urlencoded"),
    ]
    assert [server.predict("gpt", body, kind=kind).json for body, kind in bodies] == [whole] * 5


def test_stream_brings_the_new_text_as_it_is_made(server, text):
    stream = Stream(server, "gpt", {"data": PROMPT, "stream": True})
    response = stream.begin()
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert response.headers["transfer-encoding"] == "chunked"
    assert response.read().decode() == text
    stream.leave()


def test_stream_of_events_ends_with_the_reason(server, text):
    stream = Stream(server, "gpt", {"data": PROMPT}, headers=EVENTS)
    response = stream.begin()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [json.loads(event.removeprefix("data: ")) for event in response.read().decode().split("\n\n")[:-1]]
    stream.leave()
    assert "".join(event["text"] for event in events[:-1]) == text
    assert (events[-1]["done"], events[-1]["finish_reason"], events[-1]["generated_tokens"]) == (True, "length", 12)


def test_many_at_once_get_what_each_gets_alone(server):
    orders = [{"data": PROMPT[: i % 9 + 4], "max_new_tokens": i % 7 + 3} for i in range(40)]
    alone = [server.predict("gpt", order).json for order in orders[:20]]
    together = [reply.result().json for reply in server.at_once(lambda o: server.predict("gpt", o), orders)]
    assert together[:20] == alone


def test_clients_that_vanish_leave_no_block_behind(server, text):
    streams = [Stream(server, "gpt", {"data": PROMPT, "stream": True, "max_new_tokens": 200}) for _ in range(6)]
    stayed = Stream(server, "gpt", {"data": PROMPT, "stream": True})
    for stream in streams:
        stream.begin().read(1)
        stream.leave()
    assert stayed.begin().read().decode() == text
    stayed.leave()
    server.until(lambda: customized(server)["blocks_used"] == 0)


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        ({"data": ""}, None, "data is empty"),
        (b"", "text/plain", "is empty"),
        ({"data": "to be " * CONTEXT}, None, f"the model's context {CONTEXT}"),
        ({"data": PROMPT, "max_new_tokens": "many"}, None, "max_new_tokens must be a whole number, not 'many'"),
        ({"data": PROMPT, "temperature": 1e300}, None, "temperature must be a number from 0 to 100"),
        ({"data": {"text": PROMPT}}, None, "data must be text or a list of token ids, not a dict"),
        (b"\xff\xfe", "text/plain", "not UTF-8"),
        (b'{"data": "\xff"}', "application/json", "not UTF-8"),
        (b"{", "application/json", "not valid JSON"),
    ],
)
def test_what_makes_no_sense_is_answered_with_400_and_why(server, body, kind, reason):
    reply = server.predict("gpt", body, kind=kind)
    assert (reply.status, reply.headers["content-type"]) == (400, "application/json")
    assert reason in reply.message


def test_text_ends_where_a_stop_string_begins_or_at_its_length_where_none_comes(server, text):
    stop = text[5:8]
    reply = server.predict("gpt", {"data": PROMPT, "stop": stop, "details": True, "return_full_text": False}).json
    assert reply["generated_text"] == text[: text.index(stop)]
    assert reply["details"]["finish_reason"] == "stop"
    never = server.predict("gpt", {"data": PROMPT, "stop": ["never"], "details": True}).json
    assert (never["generated_text"], never["details"]["finish_reason"]) == (PROMPT + text, "length")


def test_generation_is_measured(server, text):
    server.predict("gpt", {"data": PROMPT})
    connection = http.client.HTTPConnection("127.0.0.1", server.metrics_port, timeout=30)
    connection.request("GET", "/metrics")
    shown = connection.getresponse().read().decode()
    connection.close()
    assert 'GeneratedTokens{ModelName="gpt"' in shown
    assert 'TimeToFirstToken{ModelName="gpt"' in shown


def test_kserve_and_explanations_are_answered(server, text):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v1/models/gpt:predict", json.dumps({"instances": [{"data": PROMPT}]}))
    assert json.loads(connection.getresponse().read()) == {"predictions": [{"generated_text": PROMPT + text}]}
    connection.request("POST", "/explanations/gpt", PROMPT)
    response = connection.getresponse()
    assert (response.status, b"has no explanations" in response.read()) == (400, True)
    connection.close()


def test_what_the_engine_runs_with_is_logged(server):
    told = customized(server)
    assert (told["device"], told["dtype"], told["quantization"], told["speculation"]) == ("cpu", "float32", None, None)
    assert (told["compile"], told["decode"]) == (False, "plain PyTorch")
    assert server.logged("cpu", "float32", "200 blocks")


# ---- handlers of one's own ----

OWN_STAGE = """
from flambeau.handlers.gpt import GptHandler

class Loud(GptHandler):
    def postprocess(self, data):
        return [text.upper() for text in super().postprocess(data)]
"""
OWN_LOOP = """
from flambeau.handlers.gpt import GptHandler

class Still(GptHandler):
    def generate(self, prompt_tokens, max_new_tokens, temperature=1.0, top_k=None, callback=None):
        return prompt_tokens
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory, checkpoint):
    folder = tmp_path_factory.mktemp("own")
    settings = folder / "model-config.yaml"
    settings.write_text(yaml.safe_dump({"handler": {"model_path": str(checkpoint), **GREEDY}}))
    (folder / "store").mkdir()
    for name, source in (("loud", OWN_STAGE), ("still", OWN_LOOP)):
        (folder / f"{name}.py").write_text(source)
        pack(Recipe(model_name=name, handler=str(folder / f"{name}.py"), config_file=settings), folder / "store")
    server = RunningServer(folder / "log", str(folder / "store"), env=ONE_THREAD)
    server.start_timeout_s = LOADS_S
    yield server.wait_ready()
    server.stop()


def test_stage_that_openai_s_api_goes_past_is_named_when_the_model_is_loaded(own):
    assert own.predict("loud", {"data": PROMPT}).json["generated_text"].startswith(PROMPT.upper())
    assert len(own.logged("Loud", "postprocess", "/v1/chat/completions", "/v1/completions")) == 1
    body = json.dumps({"model": "still", "prompt": PROMPT}).encode()
    reply = own.request("POST", "/v1/completions", body)
    assert reply.status == 400
    assert "without an inference or generate of its own" in reply.json["error"]["message"]


@pytest.mark.parametrize("field", [{"stop": "x"}, {"n": 2}, {"stream": True}, {"logprobs": 1}])
def test_field_that_a_loop_of_one_s_own_cannot_know_is_refused(own, field):
    assert own.predict("still", {"data": PROMPT}).json == {"generated_text": PROMPT}
    reply = own.predict("still", {"data": PROMPT, **field})
    assert (reply.status, reply.message.partition(" is not known to Still")[0]) == (400, *field)


def test_two_prompts_are_refused(own):
    reply = own.predict("loud", {"data": PROMPT, "prompt": "The sea"})
    assert (reply.status, reply.message) == (
        400,
        "data and prompt are both a prompt, and they differ; send one of them",
    )


def test_compiled_steps_are_logged_when_they_take_over(start, tmp_path):
    need_cpu_kernels()
    server = start(write_model(tmp_path / "gpt", STORYTELLER / "target", compile=True))
    server.start_timeout_s = LOADS_S
    server.wait_ready().until(lambda: customized(server)["decode"] == "CPU kernels")
    assert len(server.logged("CPU kernels")) == 1  # when the model is loaded, or when they take over later


# ---- commands ----

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "large_models" / "gpt_fast"
SUBCLASS = """
from ts.torch_handler.gpt_handler import GptHandler

class MyGptHandler(GptHandler):
    def postprocess(self, data):
        return [text.upper() for text in super().postprocess(data)]
"""
QUESTION = "The future of artificial intelligence is"


@pytest.fixture
def command(tmp_path):
    command = Command(tmp_path)
    command.configure("disable_token_authorization=true", "enable_model_api=true")
    bin_folder = str(Path(sys.executable).parent)
    command.environment |= {
        **ONE_THREAD,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    yield command
    command.stop_all()


def shell(command, line):
    with command.log_path.open("ab") as log:
        subprocess.run(
            line,
            shell=True,
            check=True,
            cwd=command.folder,
            env={**os.environ, **command.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=60,
        )


def test_commands_of_the_example_work_word_for_word(command, checkpoint):
    shutil.copytree(EXAMPLE, command.folder / EXAMPLE.relative_to(ROOT))
    paths = command.folder / "path" / "to"
    shutil.copytree(checkpoint, paths / "gpt_fast_model", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copy(checkpoint / "tokenizer.model", paths)
    pack, start, request = re.findall(r"```bash\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    shell(command, pack)
    (command.folder / "loud.py").write_text(SUBCLASS)
    others = "--model-name loud --handler loud.py --config-file model-config.yaml --export-path model_store"
    shell(command, f"torch-model-archiver {others}")
    shell(command, start)
    command.until(lambda: is_ready(command, "gpt_fast"), LOADS_S)
    texts = []
    for _ in range(3):  # a text that is drawn may end early
        shell(command, request.replace(":8080", f":{command.port}").replace("curl", "curl -s -f -o answer"))
        texts.append(json.loads((command.folder / "answer").read_text())["generated_text"])
    assert all(text.startswith(QUESTION) for text in texts)
    assert max(map(len, texts)) > len(QUESTION) + 20
    assert command.manage("POST", "/models?url=loud.mar&initial_workers=1&synchronous=true").status == 200
    loud = command.call("POST", "/predictions/loud", urlencode({"data": QUESTION}).encode()).json["generated_text"]
    assert loud == loud.upper()
    assert loud.startswith(QUESTION.upper())


def is_ready(command, model):
    try:
        return command.describe(model)["workers"][0]["status"] == "READY"
    except (OSError, KeyError, IndexError):
        return False


# ---- ranks ----


@pytest.fixture
def parallel(start, tmp_path, checkpoint):
    config = {"parallelType": "tp", "deviceType": "cpu", "torchrun": {"nproc-per-node": 2}}
    server = start(write_model(tmp_path / "gpt", checkpoint, config))
    server.start_timeout_s = LOADS_S
    return server.wait_ready()


def test_two_ranks_generate_what_one_does_and_die_as_one(parallel, text):
    [worker] = parallel.describe("gpt")["workers"]
    ranks = [rank["pid"] for rank in worker["ranks"]]
    assert len(ranks) == 2
    assert parallel.predict("gpt", {"data": PROMPT}).json == {"generated_text": PROMPT + text}
    replies = parallel.at_once(lambda order: parallel.predict("gpt", order), [{"data": PROMPT}] * 4)
    assert [reply.result().json for reply in replies] == [{"generated_text": PROMPT + text}] * 4
    stream = Stream(parallel, "gpt", {"data": PROMPT, "stream": True, "max_new_tokens": 200})
    stream.begin().read(1)
    os.kill(ranks[1], signal.SIGKILL)
    assert stream.is_broken_off()
    assert parallel.predict("gpt", {"data": PROMPT}, timeout=LOADS_S).json == {"generated_text": PROMPT + text}
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)


def test_ranks_end_together_when_they_are_stopped(parallel):
    [worker] = parallel.describe("gpt")["workers"]
    warnings = parallel.logged(level="WARNING")
    assert parallel.stop() == 0
    assert parallel.logged(level="WARNING") == warnings
    assert not any(os.path.exists(f"/proc/{rank['pid']}") for rank in worker["ranks"])
