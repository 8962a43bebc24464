"""The prompts of chats with images are those of transformers, and what cannot be shown is rejected."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from PIL import Image

from flambeau.errors import HandlerError, InvalidField
from flambeau.handlers.generation.chat_images import ChatImages
from flambeau.handlers.generation.request_reader import RequestReader
from flambeau.llm.images.image_processor import Colors, FixedProcessor
from flambeau.llm.models.vision_architecture import SiglipArchitecture
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.text.tokenizer import load_tokenizer
from flambeau.wire.generation import Generate, MediaInput, encode_request
from flambeau.wire.tokenization import Tokenize, decode_tokenized, encode_tokenize
from support.tokenizer_files import byte_level_json, write_json_tokenizer
from support.vision_models import BEGIN, END, IMAGE, NAMES, PROCESSOR, TEMPLATE, TOKENS

ARCH = SiglipArchitecture(
    hidden_size=24,
    num_layers=1,
    num_heads=3,
    intermediate_size=40,
    image_size=32,
    patch_size=4,
    norm_epsilon=1e-6,
    activation="gelu_tanh",
    num_tokens=TOKENS,
    text_size=32,
    image_id=IMAGE,
    begin_id=BEGIN,
    end_id=END,
)
TEXT_ONLY = "{% for message in messages %}{{ message.content }}{% endfor %}"
TYPES = "{% for message in messages %}{% for part in message.content %}{{ part.type }}{% endfor %}{% endfor %}"
IMAGE_PART = {"type": "image"}


def gemma(tokenizer):
    colors = Colors(rescale_factor=1 / 255, mean=(0.5, 0.5, 0.5), deviation=(0.5, 0.5, 0.5))
    return ChatImages.of(ARCH, FixedProcessor(size=32, tokens=TOKENS, resample=2, colors=colors), tokenizer)


@pytest.fixture
def tokenizer(tmp_path):
    settings = {"bos_token": NAMES[0], "eos_token": NAMES[1], "chat_template": TEMPLATE}
    return load_tokenizer(write_json_tokenizer(tmp_path, byte_level_json(NAMES), **settings))


def reader_of(tokenizer, images=None, max_length=200):
    return RequestReader(
        tokenizer,
        max_length=max_length,
        defaults=SamplingParams(),
        has_own_limit=False,
        streams=False,
        images=images,
    )


def text(words):
    return {"type": "text", "text": words}


def chat(reader, *contents):
    messages = [{"role": "user", "content": content} for content in contents]
    number = sum(part == IMAGE_PART for content in contents if isinstance(content, list) for part in content)
    images = [MediaInput(f"image {i}", "data:,") for i in range(number)]
    return reader.generate(encode_request(Generate(messages=messages, files=images)), None)


CHATS = {
    "one": [[IMAGE_PART, text("What is this?")]],
    "last": [[text("What is this? "), IMAGE_PART]],
    "lines": [[text("Look:\n"), IMAGE_PART, text("\n\nWell?")]],
    "several": ["Hello", [IMAGE_PART, IMAGE_PART, text("a b"), IMAGE_PART]],
    "names": [[text("<start_of_image> <image_soft_token>"), IMAGE_PART]],
}


@pytest.mark.parametrize("name", [name for name in CHATS if name != "names"])
def test_prompts_are_those_of_transformers(tmp_path, tokenizer, name):
    from transformers import Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"boi_token": NAMES[BEGIN], "image_token": NAMES[IMAGE], "eoi_token": NAMES[END]}
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        bos_token=NAMES[0],
        eos_token=NAMES[1],
        pad_token=NAMES[1],
        extra_special_tokens=names,
    )
    settings = {key: value for key, value in PROCESSOR.items() if key != "image_processor_type"}
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(**settings),
        tokenizer=theirs,
        chat_template=TEMPLATE,
        image_seq_length=TOKENS,
    )
    picture = {"type": "image", "image": Image.new("RGB", (9, 9))}
    messages = [
        {"role": "user", "content": [picture if part == IMAGE_PART else part for part in one]}
        if isinstance(one, list)
        else {"role": "user", "content": one}
        for one in CHATS[name]
    ]
    expected = processor.apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=True)
    found = chat(reader_of(tokenizer, gemma(tokenizer)), *CHATS[name])
    assert found.prompts == [list(expected["input_ids"][0])]


def test_names_of_tokens_in_a_text_are_no_images(tokenizer):
    found = chat(reader_of(tokenizer, gemma(tokenizer)), *CHATS["names"])
    assert found.prompts[0].count(IMAGE) == TOKENS
    assert found.prompts[0].count(BEGIN) == 1
    assert [image.name for image in found.files.images] == ["image 0"]


def test_images_count_when_a_chat_is_tokenized(tokenizer):
    reader = reader_of(tokenizer, gemma(tokenizer))
    images = [MediaInput("image 0", "https://images.example/a.png")]  # they are not fetched for this
    request = Tokenize(messages=[{"role": "user", "content": [IMAGE_PART]}], files=images)
    assert decode_tokenized(reader.tokenize(encode_tokenize(request))).tokens.count(IMAGE) == TOKENS


def test_a_model_of_text_rejects_an_image_by_its_name(tokenizer):
    with pytest.raises(InvalidField, match="image 0 is an image, but this model reads no images") as caught:
        chat(reader_of(tokenizer), [IMAGE_PART])
    assert caught.value.field == "image 0"
    with pytest.raises(InvalidField, match="reads no images"):
        reader_of(tokenizer).tokenize(encode_tokenize(Tokenize(messages=[{"role": "user", "content": [IMAGE_PART]}])))


@pytest.mark.parametrize("number", [11, 12, 30])
def test_images_that_do_not_fit_are_rejected_before_they_are_encoded(tokenizer, number):
    with pytest.raises(InvalidField, match="send fewer"):
        chat(reader_of(tokenizer, gemma(tokenizer)), [IMAGE_PART] * number)


@pytest.mark.parametrize(("template", "reason"), [(TEXT_ONLY, "shows no images"), (TYPES, "shows 0 of the 1 files")])
def test_a_template_that_shows_no_images_rejects_them(tmp_path, template, reason):
    settings = {"bos_token": NAMES[0], "eos_token": NAMES[1], "chat_template": template}
    tokenizer = load_tokenizer(write_json_tokenizer(tmp_path, byte_level_json(NAMES), **settings))
    with pytest.raises(InvalidField, match=reason):
        chat(reader_of(tokenizer, gemma(tokenizer)), [IMAGE_PART])


def test_predictions_take_no_images(tokenizer):
    reader = reader_of(tokenizer, gemma(tokenizer))
    ask = reader.read({"messages": [{"role": "user", "content": [IMAGE_PART]}]})
    with pytest.raises(InvalidField, match="/v1/chat/completions"):
        reader.encode_request(ask)


def test_a_tokenizer_without_the_tokens_of_images_is_rejected(tmp_path):
    folder = write_json_tokenizer(tmp_path, byte_level_json(), eos_token="<|end|>")
    with pytest.raises(HandlerError, match="the tokens 4, 5, 6 for images"):
        gemma(load_tokenizer(folder))
