"""Chats with sounds, by the official clients, with a tiny model that really reads them."""

from __future__ import annotations

import base64
import json
import struct
import sys
import time

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

from flambeau.http_client import fetch
from support.browser import Browser, needs_browser
from support.snippets import run, snippets

openai = pytest.importorskip("openai")
pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

from support.language_models import write_language_model  # noqa: E402
from support.network_server import serving_networks  # noqa: E402
from support.sound_models import SOUND, samples_of, wav, write_sound_model  # noqa: E402

GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
MODEL = {"model": "qwen-audio", **GREEDY}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounds")
    write_sound_model(folder / "qwen-audio", "qwen-2-audio")
    write_language_model(folder / "deaf")
    with serving_networks(folder, {name: folder / name for name in ("qwen-audio", "deaf")}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def tones(seed: int, length_s: float = 1.0) -> bytes:
    return wav(samples_of(seed, length_s))


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def sound(data: bytes, kind: str = "wav"):
    return {"type": "input_audio", "input_audio": {"data": encoded(data), "format": kind}}


def by_url(url: str):
    return {"type": "audio_url", "audio_url": {"url": url}}


def ask(client, *parts, words: str = "What is this?", **options):
    content = [*parts, {"type": "text", "text": words}]
    return client.chat.completions.create(messages=[{"role": "user", "content": content}], **{**MODEL, **options})


def refusal(client, *parts, **options) -> tuple[str, str]:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, *parts, **options)
    return caught.value.param, caught.value.message


def tokens(client, *parts):
    """The tokens of an answer, as bytes that need not be text, with their log-probabilities."""
    found = ask(client, *parts, logprobs=True).choices[0].logprobs.content
    return [(bytes(token.bytes), round(token.logprob, 3)) for token in found]


def test_the_answer_depends_on_the_sound_and_not_on_the_form_of_its_part(client):
    answers = [tokens(client, sound(tones(seed))) for seed in (1, 2, 3)]
    assert len({*map(str, answers)}) == 3
    assert tokens(client, by_url(f"data:audio/wav;base64,{encoded(tones(1))}")) == answers[0]


def test_sounds_count_as_tokens_of_the_prompt_and_are_cached(client):
    before = ask(client, words="Hello there").usage.prompt_tokens
    one = ask(client, sound(tones(11)), words="Hello there").usage
    assert one.prompt_tokens == before + 25
    assert one.prompt_tokens_details.audio_tokens == 25
    again = ask(client, sound(tones(11)), words="Hello there").usage
    assert again.prompt_tokens == one.prompt_tokens
    assert again.prompt_tokens_details.cached_tokens >= 16
    two = ask(client, sound(tones(11)), sound(tones(12)), words="Hello there").usage
    assert two.prompt_tokens == one.prompt_tokens + 25


def test_a_stream_says_what_the_whole_reply_does(client):
    chunks = [*ask(client, sound(tones(5)), stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ask(client, sound(tones(5))).choices[0].message.content


def test_responses_read_sounds_and_anthropics_api_has_none(server, client):
    chat = ask(client, sound(tones(7)), words="Well?")
    content = [sound(tones(7)), {"type": "input_text", "text": "Well?"}]
    response = client.responses.create(
        model="qwen-audio", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=12
    )
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    body = {"model": "qwen-audio", "max_tokens": 5, "messages": [{"role": "user", "content": [sound(tones(7))]}]}
    reply = fetch(server.url, "POST", "/v1/messages", json.dumps(body).encode(), timeout_s=60)
    assert reply.status == 400
    assert "input_audio" in reply.json["error"]["message"]


def test_chats_with_sounds_are_tokenized(server):
    messages = [{"role": "user", "content": [sound(tones(1, 0.1))]}]  # a short body
    body = json.dumps({"model": "qwen-audio", "messages": messages}).encode()
    reply = fetch(server.url, "POST", "/tokenize", body, {"content-type": "application/json"}, timeout_s=60)
    assert reply.json["tokens"].count(SOUND) == 2


def long_wav(hours: float, rate: int = 8) -> bytes:
    """A file of so many hours, of few samples a second."""
    size = int(hours * 3600 * rate)
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36, b"WAVE", b"fmt ", 16, 1, 1, rate, rate, 1, 8, b"data", size)
    return head + bytes(size)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (tones(1)[:40], "cut off"),
        (tones(1)[:20_000], "cut off: 19956 of 32000 bytes of samples are there; send the whole file"),
        (b"RIFF____WAVE" + bytes(100), "cut off"),
        (np.random.default_rng(0).bytes(5000), "the 5000 bytes are not a"),  # the rest depends on soundfile
        (wav(np.zeros(0, np.float32)), "no samples"),
        (wav(np.zeros(1, np.float32)), "too short for this model; send a longer one"),
        (tones(1, 2.5), "the limit is 2 s: send it in parts"),
        (long_wav(10), "the limit is 2 s: send it in parts"),
        (wav(samples_of(1, 0.1), rate=767_999), "cannot be converted to 16000"),
    ],
)
def test_a_sound_that_is_not_read_is_named_at_once(client, data, reason):
    began = time.monotonic()
    parameter, message = refusal(client, sound(tones(1)), sound(data))
    assert time.monotonic() - began < 10
    assert parameter == "messages[0].content[1]"
    assert message.count(parameter) == 1
    assert reason in message


def test_a_sound_that_is_not_base64_is_named_once(client):
    part = {"type": "input_audio", "input_audio": {"data": "data:audio/wav;base64,AAAA", "format": "wav"}}
    parameter, message = refusal(client, part)
    assert message.count(parameter) == 1
    assert "is not valid base64" in message


def test_a_remote_sound_needs_allowed_urls(client):
    parameter, message = refusal(client, by_url("https://sounds.example/a.wav"))
    assert parameter == "messages[0].content[0]"
    assert "does not fetch sounds from that address" in message
    assert "allowed_urls" in message


def test_models_without_an_encoder_of_a_kind_refuse_its_files(client):
    parameter, message = refusal(client, sound(tones(1)), model="deaf")
    assert parameter == "messages[0].content[0]"
    assert "is a sound, and the model 'deaf' reads no sounds" in message
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    _, message = refusal(client, image)
    assert "is an image, and the model 'qwen-audio' reads no images" in message


def test_models_say_whether_they_read_sounds(client):
    abilities = {model.id: model.abilities for model in client.models.list()}
    assert "audio" in abilities["qwen-audio"]
    assert "vision" not in abilities["qwen-audio"]
    assert "audio" not in abilities["deaf"]


@pytest.mark.browser
@needs_browser()
def test_the_consoles_chat_attaches_sounds(server, tmp_path):
    (tmp_path / "question.wav").write_bytes(tones(1))
    browser = Browser()
    try:
        browser.open(f"{server.management_url}/#/play/deaf/1.0")
        browser.find("#prompt")
        assert browser.find_all("//input[@id='attach']") == []
        browser.open(f"{server.management_url}/#/play/qwen-audio/1.0")
        browser.find("#attach").send_keys(str(tmp_path / "question.wav"))
        browser.wait(lambda: browser.find(".attached .sound"))
        browser.evaluate("(document.querySelector('#length').value = 5, document.querySelector('#seed').value = 1, 0)")
        browser.find("#prompt").send_keys("What is this?", Keys.ENTER)
        browser.wait(lambda: "first token" in browser.find(".turn.assistant small").text)
        assert browser.find(".turn.user .sound").text == "question.wav"
        assert "audio/wav;base64,…" in browser.find(".snippet pre").text.replace("x-wav", "wav")
        assert browser.errors == []
    finally:
        browser.close()


def test_docs_can_be_followed(server, tmp_path):
    [code] = [code for code in snippets("docs/openai.md", "python") if "input_audio" in code]
    (tmp_path / "question.wav").write_bytes(tones(1))
    result = run(f"{sys.executable} - <<'END'\n{code.replace(':8080', f':{server.port}')}\nEND", tmp_path)
    assert result.returncode == 0, result.stderr
