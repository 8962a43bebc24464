"""Chats with images of any size, by the official client, with a tiny Qwen2.5-VL that really reads them."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import pytest
import torch

from flambeau.archive.pack import Recipe, pack
from flambeau.http_client import fetch
from support.pictures import encode, jpeg, picture
from support.running import RunningServer

openai = pytest.importorskip("openai")
pytest.importorskip("transformers")

from support.grid_vision_models import BEGIN, END, IMAGE, write_grid_model  # noqa: E402
from support.language_models import ONE_THREAD  # noqa: E402
from support.pretrained_vision_models import KINDS, write_pretrained_vision_model  # noqa: E402

SETTINGS = """
minWorkers: 1
maxWorkers: 1
handler:
  model_path: {folder}
  max_num_seqs: 8
  num_blocks: 256
"""
GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
MODEL = {"model": "qwen", **GREEDY}
# Files, and how many tokens they take.
WIDE, TALL = (jpeg(1, 120, 40), 75), (encode(picture(50, 75, 2), "PNG"), 54)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    return folder, write_grid_model(folder / "qwen", "qwen_2.5")


@pytest.fixture(scope="module")
def mistral(made):
    """A model whose encoder is transformers'."""
    return write_pretrained_vision_model(made[0] / "mistral", KINDS["mistral-3"])


@pytest.fixture(scope="module")
def server(made, mistral):
    folder = made[0]
    (folder / "store").mkdir()
    for name in ("qwen", "mistral"):
        settings = folder / f"{name}.yaml"
        settings.write_text(SETTINGS.format(folder=folder / name))
        recipe = Recipe(model_name=name, handler="gpt_handler", config_file=settings)
        pack(recipe, folder / "store", format="no-archive")
    running = RunningServer(folder / "log", str(folder / "store"), env=ONE_THREAD).wait_listening()
    running.until(lambda: running.is_ready, timeout=120)  # it loads torch
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def part(file: tuple[bytes, int]):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file[0]).decode()}"}}


def user(*parts):
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else part(p) for p in parts]}


def ask(client, *messages, **options):
    return client.chat.completions.create(messages=[*messages], **{**MODEL, **options})


def tokens_of(server, *messages, model: str = "qwen") -> list[int]:
    body = json.dumps({"model": model, "messages": [*messages]}).encode()
    reply = fetch(server.url, "POST", "/tokenize", body, {"content-type": "application/json"}, timeout_s=60)
    return list(reply.json["tokens"])


def reference_logits(model, ids: list[int], files):
    """What transformers reads in the same files."""
    import io

    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from support.grid_vision_models import PROCESSOR

    settings = {k: v for k, v in PROCESSOR.items() if k not in ("image_processor_type", "processor_class")}
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data, _ in files]
    given = Qwen2VLImageProcessorPil(**settings)(images, return_tensors="pt")
    model.model.rope_deltas = None
    types = torch.tensor([[int(token == IMAGE) for token in ids]])
    with torch.inference_mode():
        return model(torch.tensor([ids]), mm_token_type_ids=types, **given).logits[0].log_softmax(-1)


def test_answers_are_those_of_transformers(server, client, made):
    """From the files to the text: an image, then another one in the second turn."""
    first = user("What is ", WIDE, " this?")
    answer = ask(client, first).choices[0].message.content
    for files, messages in (
        ([WIDE], [first]),
        ([WIDE, TALL], [first, {"role": "assistant", "content": answer}, user(TALL, "And this?")]),
    ):
        ids = tokens_of(server, *messages)
        assert [ids.count(token) for token in (BEGIN, IMAGE, END)] == [len(files), sum(n for _, n in files), len(files)]
        found = ask(client, *messages, logprobs=True, max_tokens=1).choices[0].logprobs.content[0]
        expected = reference_logits(made[1], ids, files)[-1]
        assert found.logprob == pytest.approx(float(expected.max()), abs=1e-4)


def test_answers_with_an_encoder_of_transformers_are_its_own(server, client, made, mistral):
    import io

    from PIL import Image
    from transformers import AutoImageProcessor, AutoProcessor

    processor = AutoProcessor.from_pretrained(made[0] / "mistral")
    processor.image_processor = AutoImageProcessor.from_pretrained(made[0] / "mistral", backend="pil")
    template = processor.tokenizer.chat_template
    for files in ([WIDE], [TALL, WIDE]):
        message = user("What is ", *files, " this?")
        opened = iter(Image.open(io.BytesIO(data)).convert("RGB") for data, _ in files)
        parts = [{"type": "image", "image": next(opened)} if "image_url" in p else p for p in message["content"]]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": parts}],
            template,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        )
        assert tokens_of(server, message, model="mistral") == inputs["input_ids"][0].tolist()
        found = ask(client, message, model="mistral", logprobs=True, max_tokens=1)
        with torch.inference_mode():
            expected = mistral(**inputs).logits[0, -1].log_softmax(-1)
        assert found.choices[0].logprobs.content[0].logprob == pytest.approx(float(expected.max()), abs=1e-4)
        assert found.usage.prompt_tokens == inputs["input_ids"].shape[1]


def test_images_count_by_their_size_and_are_cached(server, client):
    words = ask(client, user("Hello there")).usage.prompt_tokens
    wide = ask(client, user(WIDE, "Hello there")).usage
    assert wide.prompt_tokens == words + WIDE[1] + 2
    assert ask(client, user(TALL, "Hello there")).usage.prompt_tokens == words + TALL[1] + 2
    again = ask(client, user(WIDE, "Hello there")).usage
    assert again.prompt_tokens_details.cached_tokens >= WIDE[1]
    assert len(tokens_of(server, user(WIDE, "Hello there"))) == wide.prompt_tokens


def test_texts_and_images_are_answered_together(client):
    """Each as alone, whatever else is in the batch."""
    asked = [user("Hello"), user(WIDE, "Well?"), user("Well, ", TALL, TALL), user("Hello")]
    alone = [ask(client, message).choices[0].message.content for message in asked]
    streams = [ask(client, message, stream=True) for message in asked]
    for stream, text in zip(streams, alone, strict=True):
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ((b"no image", 0), "is not an image that can be read"),
        ((jpeg(1, 402, 2), 0), "at most 200 times as long"),
        ((jpeg(1)[:3000], 0), "truncated"),
    ],
)
def test_an_image_that_cannot_be_read_is_named(client, file, reason):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, user(WIDE, file))
    assert caught.value.param == "messages[0].content[1]"
    assert reason in caught.value.message


def test_a_model_without_videos_refuses_them(client):
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="is a video, and the model 'mistral' reads no videos"):
        ask(client, {"role": "user", "content": [video]}, model="mistral")


@pytest.mark.parametrize("target", ["{url} --model qwen", "{url} --model mistral", "{folder}/qwen"])
def test_prompts_of_benchmarks_have_no_tokens_of_images(server, made, target):
    words = target.format(url=server.url, folder=made[0]).split()
    command = [
        sys.executable,
        "-m",
        "flambeau",
        "llm",
        "bench",
        *words,
        "--streams",
        "8",
        "--prompt-tokens",
        "200",
        "--new-tokens",
        "2",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr


def test_the_model_says_that_it_reads_images(client):
    models = client.models.list().data
    assert {model.id for model in models if "vision" in model.abilities} == {"qwen", "mistral"}
