"""Images, videos and sounds in one chat: the prompt and the tokens are those of transformers' whole model."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("av")
pytest.importorskip("torchvision")

from flambeau.errors import InvalidField
from flambeau.handlers.generation.chat_images import ChatImages
from flambeau.handlers.generation.chat_sounds import ChatSounds
from flambeau.handlers.generation.media_files import to_file
from flambeau.handlers.generation.request_reader import RequestReader
from flambeau.llm.engine import Engine
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.images.video_files import VideoFile, facts_of
from flambeau.llm.sampling_params import SamplingParams
from flambeau.wire.generation import Generate, MediaInput, encode_request
from support.pictures import jpeg
from support.pretrained_video_models import VIDEO_KINDS
from support.pretrained_vision_models import write_pretrained_vision_model
from support.sound_models import RATE, SOUND_KINDS, samples_of, wav
from support.videos import frames_of, video
from unit.llm.images.test_pretrained_videos import GREEDY, check, text

IMAGE, VIDEO, SOUND = {"type": "image"}, {"type": "video"}, {"type": "audio"}
CLIP, PICTURE, SPOKEN = video(1, 64, 48, 18, 6), jpeg(1, 60, 44), samples_of(2, 0.43)
CONTENTS = [text("What is "), SOUND, text(" in "), VIDEO, IMAGE, text("?"), SOUND]
FILES = (wav(SPOKEN), CLIP, PICTURE, wav(SPOKEN[:4000]))
KINDS = ("sound", "video", "image", "sound")


@pytest.fixture(scope="module", params=["gemma-4", "gemma-4-unified"])
def made(request, tmp_path_factory):
    kind = VIDEO_KINDS[request.param]
    config = {**kind.config, "audio_config": SOUND_KINDS[request.param].config["audio_config"]}
    folder = tmp_path_factory.mktemp("all")
    reference = write_pretrained_vision_model(folder, replace(kind, config=config))
    options = {"compile": False, "device": "cpu", "block_size": 4, "max_step_tokens": 50}
    return folder, reference, Engine.from_pretrained(folder, **options)


def prompted(engine: Engine, contents: list[Any], files: list[MediaInput]) -> Any:
    images, sounds = engine.images, engine.sounds
    reader = RequestReader(
        engine.tokenizer,
        max_length=2000,
        defaults=SamplingParams(),
        has_own_limit=False,
        streams=False,
        images=ChatImages.of(images.arch, images.processor, engine.tokenizer, images.videos),
        sounds=ChatSounds.of(sounds.arch, sounds.processor, engine.tokenizer),
    )
    messages = [{"role": "user", "content": contents}]
    return reader.generate(encode_request(Generate(messages=messages, files=files)), None)


def inputs() -> list[MediaInput]:
    urls = [f"data:any;base64,{base64.b64encode(data).decode()}" for data in FILES]
    return [MediaInput(f"file {i}", url, kind=kind) for i, (url, kind) in enumerate(zip(urls, KINDS, strict=True))]


def their_inputs(made: Any) -> Any:
    import transformers
    from transformers.video_utils import VideoMetadata

    folder, _, engine = made
    processor = transformers.AutoProcessor.from_pretrained(folder)
    processor.image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    words = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": CONTENTS}], tokenize=False, add_generation_prompt=True
    )
    frames, file = frames_of(CLIP), VideoFile(data=CLIP, name="")
    metadata = VideoMetadata(total_num_frames=len(frames), fps=6.0, duration=len(frames) / 6.0)
    metadata.frames_indices = engine.images.videos.places(file, facts_of(file))
    return processor(
        text=[words],
        images=[Image.open(io.BytesIO(PICTURE)).convert("RGB")],
        videos=[[frames[[*metadata.frames_indices]]]],
        video_metadata=[metadata],
        audio=[SPOKEN, SPOKEN[:4000]],
        sampling_rate=RATE,
        do_sample_frames=False,
        add_special_tokens=False,
        return_tensors="pt",
    )


def test_a_chat_with_an_image_a_video_and_sounds_is_that_of_transformers(made):
    _, reference, engine = made
    read = prompted(engine, CONTENTS, inputs())
    expected = their_inputs(made)
    [ids] = read.prompts
    assert ids == expected["input_ids"][0].tolist()
    encoded = [
        *engine.encode_sounds(read.files.sounds),
        *engine.encode_images([to_file(image) for image in read.files.images]),
    ]
    for _ in range(2):
        [found] = engine.generate([ids], GREEDY, logprobs=1, media=[encoded])
        check(reference, expected, ids, found)
    assert found.counts.num_cached == (len(ids) - 1) // 4 * 4
    assert {one.kind for one in encoded} == {"image", "video", "sound"}
    assert torch.equal(engine.encode_sounds(read.files.sounds)[0].features, encoded[0].features)


def test_files_that_do_not_fit_their_places_are_refused(made):
    engine = made[2]
    read = prompted(engine, CONTENTS, inputs())
    with pytest.raises(InvalidRequest, match="send sounds in the messages of a chat"):
        engine.generate(read.prompts, GREEDY, media=[engine.encode_images([to_file(one) for one in read.files.images])])
    with pytest.raises(InvalidField, match="places for 2 sounds and 1 video and 1 image, and the request 2 sounds"):
        prompted(engine, CONTENTS, [one for one in inputs() if one.kind == "sound"])
