"""Chats with images, by the official clients, with a tiny model that really reads them."""

from __future__ import annotations

import base64
import json
import sys

import pytest
from PIL import Image
from selenium.webdriver.common.keys import Keys

from flambeau.http_client import fetch
from support.browser import Browser, needs_browser
from support.pictures import claimed_png, encode, jpeg, picture
from support.snippets import run, snippets

openai = pytest.importorskip("openai")
pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

from support.language_models import write_language_model  # noqa: E402
from support.network_server import serving_networks  # noqa: E402
from support.vision_models import IMAGE, TOKENS, write_vision_model  # noqa: E402

GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
MODEL = {"model": "gemma", **GREEDY}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    write_vision_model(folder / "gemma")
    write_language_model(folder / "blind")
    with serving_networks(folder, {name: folder / name for name in ("gemma", "blind")}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def data_url(data: bytes, kind: str = "jpeg") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image(url: str):
    return {"type": "image_url", "image_url": {"url": url}}


def ask(client, *urls: str, words: str = "What is this?", **options):
    content = [*map(image, urls), {"type": "text", "text": words}]
    return client.chat.completions.create(messages=[{"role": "user", "content": content}], **{**MODEL, **options})


def refusal(client, *urls: str, **options) -> tuple[str, str]:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, *urls, **options)
    return caught.value.param, caught.value.message


def tokens(client, *urls: str):
    """The tokens of an answer, as bytes that need not be text, with their log-probabilities."""
    found = ask(client, *urls, logprobs=True).choices[0].logprobs.content
    return [(bytes(token.bytes), round(token.logprob, 3)) for token in found]


def test_the_answer_depends_on_the_image(client):
    answers = {seed: tokens(client, data_url(jpeg(seed))) for seed in (1, 2, 3)}
    answers[4] = tokens(client, data_url(encode(picture(50, 40, 4), "PNG"), "png"))
    assert len({str(answer) for answer in answers.values()}) == 4
    assert tokens(client, data_url(jpeg(1))) == answers[1]


def test_a_large_image_is_read(client):
    noise = Image.effect_noise((1500, 1500), 200).convert("RGB")
    data = encode(noise, "PNG")
    assert 2_000_000 < len(data) < 4_500_000
    assert len(tokens(client, data_url(data, "png"))) == 12


def test_images_count_as_tokens_of_the_prompt_and_are_cached(client):
    before = ask(client, words="Hello there").usage.prompt_tokens
    url = data_url(jpeg(11))
    one = ask(client, url, words="Hello there").usage
    assert one.prompt_tokens >= before + TOKENS + 2
    again = ask(client, url, words="Hello there").usage
    assert again.prompt_tokens == one.prompt_tokens
    assert again.prompt_tokens_details.cached_tokens >= TOKENS
    two = ask(client, url, data_url(jpeg(12)), words="Hello there").usage
    assert two.prompt_tokens >= one.prompt_tokens + TOKENS + 2


def test_a_stream_says_what_the_whole_reply_does(client):
    url = data_url(jpeg(5))
    chunks = [*ask(client, url, stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ask(client, url).choices[0].message.content


def test_other_apis_read_the_same_image(server, client):
    data = jpeg(7)
    chat = ask(client, data_url(data), words="Well?")
    content = [{"type": "input_image", "image_url": data_url(data)}, {"type": "input_text", "text": "Well?"}]
    response = client.responses.create(
        model="gemma", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=12
    )
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    later = client.responses.create(
        model="gemma", previous_response_id=response.id, input="And?", temperature=0, max_output_tokens=5
    )
    assert later.usage.input_tokens > response.usage.input_tokens + response.usage.output_tokens
    source = {"type": "base64", "media_type": "image/jpeg", "data": base64.b64encode(data).decode()}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "Well?"}]}]
    anthropic = pytest.importorskip("anthropic")  # takes seconds: not when tests are collected
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as other:
        message = other.messages.create(model="gemma", max_tokens=12, messages=messages, extra_body={"temperature": 0})
        counted = other.messages.count_tokens(model="gemma", messages=messages)
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    assert counted.input_tokens == chat.usage.prompt_tokens
    assert message.content[0].text == response.output_text


def test_chats_with_images_are_tokenized(server):
    messages = [{"role": "user", "content": [image(data_url(jpeg(1)))]}]
    body = json.dumps({"model": "gemma", "messages": messages}).encode()
    reply = fetch(server.url, "POST", "/tokenize", body, {"content-type": "application/json"}, timeout_s=60)
    assert reply.json["tokens"].count(IMAGE) == TOKENS


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (data_url(b"no image"), "is not an image that can be read"),
        (data_url(jpeg(1)[:3000]), "truncated"),
        (data_url(claimed_png(20_000, 20_000), "png"), "pixels"),
        ("data:image/png;base64,%%%", "not valid base64"),
    ],
)
def test_an_image_that_cannot_be_read_is_named(client, url, reason):
    parameter, message = refusal(client, data_url(jpeg(1)), url)
    assert parameter == "messages[0].content[1]"
    assert parameter in message
    assert reason in message


def test_a_remote_image_needs_allowed_urls(client):
    parameter, message = refusal(client, "https://images.example/a.png")
    assert parameter == "messages[0].content[0]"
    assert "allowed_urls" in message


def test_a_model_of_text_rejects_images(client):
    parameter, message = refusal(client, data_url(jpeg(1)), model="blind")
    assert parameter == "messages[0].content[0]"
    assert "'blind' reads no images" in message


@pytest.mark.browser
@needs_browser()
def test_the_consoles_chat_attaches_images(server, tmp_path):
    (tmp_path / "cat.jpg").write_bytes(jpeg(1))
    browser = Browser()
    try:
        browser.open(f"{server.management_url}/#/play/blind/1.0")
        browser.find("#prompt")
        assert browser.find_all("//input[@id='attach']") == []
        browser.open(f"{server.management_url}/#/play/gemma/1.0")
        browser.find("#attach").send_keys(str(tmp_path / "cat.jpg"))
        browser.wait(lambda: browser.find(".attached img"))
        browser.evaluate("(document.querySelector('#length').value = 5, document.querySelector('#seed').value = 1, 0)")
        browser.find("#prompt").send_keys("What is this?", Keys.ENTER)
        browser.wait(lambda: "first token" in browser.find(".turn.assistant small").text)
        assert browser.find(".turn.user img").get_attribute("alt") == "cat.jpg"
        assert browser.find_all("//*[@class='attached']/img") == []
        assert "data:image/jpeg;base64,…" in browser.find(".snippet pre").text
        assert browser.errors == []
    finally:
        browser.close()


def test_docs_can_be_followed(server, tmp_path):
    [code] = [code for code in snippets("docs/openai.md", "python") if "image_url" in code]
    (tmp_path / "cat.jpg").write_bytes(jpeg(1))
    result = run(f"{sys.executable} - <<'END'\n{code.replace(':8080', f':{server.port}')}\nEND", tmp_path)
    assert result.returncode == 0, result.stderr


def test_models_say_whether_they_read_images(client):
    abilities = {model.id: model.abilities for model in client.models.list()}
    assert "vision" in abilities["gemma"]
    assert "vision" not in abilities["blind"]
