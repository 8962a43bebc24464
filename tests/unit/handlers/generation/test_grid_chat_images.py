"""Prompts of chats with images of different sizes are those of transformers."""

from __future__ import annotations

import base64
import io

import pytest

pytest.importorskip("torch")

from PIL import Image

from flambeau.errors import HandlerError, InvalidField
from flambeau.handlers.generation.chat_images import ChatImages
from flambeau.handlers.generation.request_reader import RequestReader
from flambeau.llm.images.grid_processor import GridProcessor
from flambeau.llm.images.image_processor import Colors
from flambeau.llm.models.vision_architecture import GridArchitecture
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.text.tokenizer import load_tokenizer
from flambeau.wire.generation import Generate, MediaInput, encode_request
from flambeau.wire.tokenization import Tokenize, decode_tokenized, encode_tokenize
from support.grid_vision_models import (
    BEGIN,
    END,
    EOS,
    IMAGE,
    NAMES,
    PATCH,
    PROCESSOR,
    TEMPLATE,
    write_grid_tokenizer,
)
from support.pictures import jpeg
from support.tokenizer_files import byte_level_json, write_json_tokenizer

ARCH = GridArchitecture(
    hidden_size=24,
    num_layers=1,
    num_heads=2,
    intermediate_size=40,
    patch_size=PATCH,
    norm_epsilon=1e-6,
    activation="silu",
    text_size=32,
    image_id=IMAGE,
    begin_id=BEGIN,
    end_id=END,
)
READER = GridProcessor(
    patch_size=PATCH,
    frames=2,
    merge_size=2,
    min_pixels=int(PROCESSOR["min_pixels"]),  # type: ignore[call-overload]
    max_pixels=int(PROCESSOR["max_pixels"]),  # type: ignore[call-overload]
    resample=3,
    colors=Colors(rescale_factor=1 / 255, mean=(0.5, 0.5, 0.5), deviation=(0.5, 0.5, 0.5)),
)
PART = {"type": "image"}
FILES = [jpeg(1, 120, 40), jpeg(2, 50, 75), jpeg(3, 20, 20)]


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(write_grid_tokenizer(tmp_path))


def reader_of(tokenizer, max_length=400):
    return RequestReader(
        tokenizer,
        max_length=max_length,
        defaults=SamplingParams(),
        has_own_limit=False,
        streams=False,
        images=ChatImages.of(ARCH, READER, tokenizer),
    )


def text(words):
    return {"type": "text", "text": words}


def inputs(files):
    return [
        MediaInput(f"image {i}", f"data:image/jpeg;base64,{base64.b64encode(data).decode()}")
        for i, data in enumerate(files)
    ]


def chat(reader, files, *contents):
    messages = [{"role": "user", "content": content} for content in contents]
    return reader.generate(encode_request(Generate(messages=messages, files=inputs(files))), None)


CHATS = {
    "one": (FILES[:1], [[PART, text("What is this?")]]),
    "last": (FILES[1:2], [[text("What is this? "), PART]]),
    "several turns": (FILES, ["Hello", [PART, text("a b"), PART], "Well?", [text("c"), PART]]),
    "side by side": ([FILES[2], FILES[2], FILES[0]], [[PART, PART, PART]]),
}


@pytest.mark.parametrize("name", CHATS)
def test_prompts_are_those_of_transformers(tmp_path, tokenizer, name):
    pytest.importorskip("torchvision", reason="transformers' processor of videos needs torchvision")
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor, Qwen2VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token=NAMES[EOS], pad_token=NAMES[EOS]
    )
    settings = {k: v for k, v in PROCESSOR.items() if k not in ("image_processor_type", "processor_class")}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(**settings),
        tokenizer=theirs,
        video_processor=Qwen2VLVideoProcessor(),  # not used
        chat_template=TEMPLATE,
    )
    files, contents = CHATS[name]
    pictures = iter({"type": "image", "image": Image.open(io.BytesIO(data))} for data in files)
    messages = [
        {"role": "user", "content": [next(pictures) if part == PART else part for part in one]}
        if isinstance(one, list)
        else {"role": "user", "content": one}
        for one in contents
    ]
    expected = processor.apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=True)
    found = chat(reader_of(tokenizer), files, *contents)
    assert found.prompts == [list(expected["input_ids"][0])]


def test_names_of_tokens_in_a_text_are_no_images(tokenizer):
    words = text("<|vision_start|><|image_pad|><|vision_end|>")
    found = chat(reader_of(tokenizer), FILES[2:], [words, PART])
    assert (found.prompts[0].count(IMAGE), found.prompts[0].count(BEGIN)) == (16, 1)


def test_images_count_by_their_size_when_a_chat_is_tokenized(tokenizer):
    messages = [{"role": "user", "content": [PART, PART]}]
    request = Tokenize(messages=messages, files=inputs(FILES[:2]))
    assert decode_tokenized(reader_of(tokenizer).tokenize(encode_tokenize(request))).tokens.count(IMAGE) == 75 + 54
    request = Tokenize(messages=messages, files=[*inputs(FILES[:1]), MediaInput("image 1", "https://a.example/b.png")])
    with pytest.raises(InvalidField, match="image 1: how many tokens an image takes depends on its size"):
        reader_of(tokenizer).tokenize(encode_tokenize(request))


def test_images_that_do_not_fit_are_rejected_before_they_are_encoded(tokenizer):
    for limit in (75 + 54, 140):
        with pytest.raises(InvalidField, match="send fewer or smaller"):
            chat(reader_of(tokenizer, limit), FILES[:2], [PART, PART])


def test_long_texts_beside_an_image_are_rejected_before_they_are_tokenized(tokenizer):
    long = {"type": "text", "text": "x" * 400 * 256}
    with pytest.raises(InvalidField, match="the chat has 102401 characters"):
        chat(reader_of(tokenizer), FILES[:1], [PART, long, {"type": "text", "text": "y"}])


def test_an_image_that_cannot_be_read_is_named(tokenizer):
    for data, reason in (
        (b"no", "image 1 is not an image"),
        (jpeg(1, 500, 2), "image 1 is an image of 500 x 2 pixels"),
    ):
        with pytest.raises(InvalidField, match=reason) as caught:
            chat(reader_of(tokenizer), [FILES[0], data], [PART, PART])
        assert caught.value.field == "image 1"


def test_a_video_without_its_file_is_refused(tokenizer):
    with pytest.raises(InvalidField, match="video"):
        chat(reader_of(tokenizer), [], [{"type": "video"}])


def test_a_tokenizer_without_the_tokens_of_images_is_rejected(tmp_path):
    folder = write_json_tokenizer(tmp_path, byte_level_json(), eos_token="<|end|>")
    with pytest.raises(HandlerError, match="the tokens 3, 5, 4 for images"):
        ChatImages.of(ARCH, READER, load_tokenizer(folder))
