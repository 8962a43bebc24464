"""Chats with videos, by the official client, with a tiny Qwen3-VL that really reads them."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from flambeau.archive.pack import Recipe, pack
from flambeau.http_client import fetch
from support.pictures import jpeg
from support.running import RunningServer

openai = pytest.importorskip("openai")
pytest.importorskip("av")
pytest.importorskip("torchvision")
pytest.importorskip("transformers")

from support.grid_vision_models import VIDEO, grid_processor_of, write_grid_model  # noqa: E402
from support.language_models import ONE_THREAD  # noqa: E402
from support.videos import data_url, frames_of, jpegs, video  # noqa: E402

SETTINGS = """
minWorkers: 1
maxWorkers: 1
handler:
  model_path: {folder}
  max_num_seqs: 8
  num_blocks: 256
"""
GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
CLIP = video(1, 120, 40, 12, 6)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    return folder, write_grid_model(folder / "qwen", "qwen_3")


@pytest.fixture(scope="module")
def server(made):
    folder = made[0]
    (folder / "store").mkdir()
    settings = folder / "qwen.yaml"
    settings.write_text(SETTINGS.format(folder=folder / "qwen"))
    pack(Recipe(model_name="qwen", handler="gpt_handler", config_file=settings), folder / "store", format="no-archive")
    running = RunningServer(folder / "log", str(folder / "store"), env=ONE_THREAD).wait_listening()
    running.until(lambda: running.is_ready, timeout=120)  # it loads torch
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def part(data):
    return {"type": "video_url", "video_url": {"url": data_url(data)}}


def user(*parts):
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else part(p) for p in parts]}


def ask(client, *messages, **options):
    return client.chat.completions.create(messages=[*messages], model="qwen", **{**GREEDY, **options})


def test_answers_are_those_of_transformers(server, client, made):
    """From the file to the text: a video, which is then found in the cache, and frames as JPEGs."""
    from transformers.video_utils import VideoMetadata

    processor = grid_processor_of(made[0] / "qwen", "qwen_3")
    content = [{"type": "text", "text": "What is "}, {"type": "video"}, {"type": "text", "text": " this?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    frames = frames_of(CLIP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = processor(
            text=[text],
            videos=[frames],
            video_metadata=[VideoMetadata(total_num_frames=12, fps=6.0, duration=2.0)],
            return_tensors="pt",
        )
    message = user("What is ", CLIP, " this?")
    body = json.dumps({"model": "qwen", "messages": [message]}).encode()
    reply = fetch(server.url, "POST", "/tokenize", body, {"content-type": "application/json"}, timeout_s=60)
    assert list(reply.json["tokens"]) == inputs["input_ids"][0].tolist()
    found = ask(client, message, logprobs=True)
    with torch.inference_mode():
        expected = made[1](**inputs).logits[0, -1].log_softmax(-1)
    assert found.choices[0].logprobs.content[0].logprob == pytest.approx(float(expected.max()), abs=1e-4)
    assert found.usage.prompt_tokens == inputs["input_ids"].shape[1]
    again = ask(client, message)
    assert again.choices[0].message.content == found.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= int((inputs["input_ids"] == VIDEO).sum())
    assert ask(client, user(jpegs(4), "and this?")).usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"no video", "is not a video that can be read"),
        (CLIP[:800], "is not a video that can be read"),
        (video(1, 40, 40, 1), "send at least two, or an image"),
        (jpeg(1), "is not a video that can be read"),
        (jpegs(1) * 800, "800 frames; send at most 768"),
        (jpegs(1, 256, 256) * 200, "those of 1 video included, and the model's context"),
    ],
)
def test_a_video_that_cannot_be_read_is_named(client, data, reason):
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        ask(client, user("Hello ", data))
    assert caught.value.param in ("messages[0].content[1]", "messages")


def test_the_model_says_that_it_reads_videos(client):
    [model] = client.models.list().data
    assert {"vision", "video"} <= {*model.abilities}
    with pytest.raises(openai.BadRequestError, match="mm_processor_kwargs"):
        ask(client, user(CLIP), extra_body={"mm_processor_kwargs": {"fps": 1}})
