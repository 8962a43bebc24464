"""Models whose videos transformers encodes: prompts, embeddings and tokens are those of its whole model."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("av")
pytest.importorskip("torchvision")

from flambeau.handlers.generation.chat_images import ChatImages
from flambeau.handlers.generation.request_reader import RequestReader
from flambeau.llm.engine import Engine
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.images.video_files import VideoFile, facts_of
from flambeau.llm.sampling_params import SamplingParams
from flambeau.wire.generation import Generate, MediaInput, encode_request
from support.omni_models import VIDEO_SIZES
from support.pictures import jpeg
from support.pretrained_video_models import VIDEO_KINDS
from support.pretrained_vision_models import write_pretrained_vision_model
from support.videos import data_url, frames_of, jpegs, video

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
CLIP, LONG, PICTURE = video(1, 64, 48, 18, 6), video(2, 48, 80, 33, 10), jpeg(1, 60, 44)
OMNI = ("Qwen2_5OmniProcessor", "Qwen3OmniMoeProcessor")
RATES = {CLIP: 6.0, LONG: 10.0}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


CHATS: list[tuple[list[Any], tuple[bytes, ...]]] = [
    ([text("What is "), VIDEO, text("this?")], (CLIP,)),
    ([VIDEO, text("Well, "), IMAGE, text(" and "), VIDEO, text("so")], (CLIP, PICTURE, LONG)),
]


def their_inputs(folder: Path, contents: Sequence[Any], files: Sequence[bytes], videos: Any) -> Any:
    """What transformers makes of a chat; `videos` chooses frames, as its own processor does where it is asked to."""
    import transformers
    from transformers.video_utils import VideoMetadata

    processor = transformers.AutoProcessor.from_pretrained(folder)
    processor.image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    words = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": [*contents]}], tokenize=False, add_generation_prompt=True
    )
    kinds = [part["type"] for part in contents if part in (IMAGE, VIDEO)]
    given: dict[str, Any] = {"videos": [], "video_metadata": []}
    images = []
    for kind, data in zip(kinds, files, strict=True):
        if kind == "image":
            images.append(Image.open(io.BytesIO(data)).convert("RGB"))
            continue
        frames, rate = frames_of(data), RATES[data]
        metadata = VideoMetadata(total_num_frames=len(frames), fps=rate, duration=len(frames) / rate)
        file = VideoFile(data=data, name="")
        metadata.frames_indices = [*videos.places(file, facts_of(file))]
        given["videos"].append(frames[[*metadata.frames_indices]])
        given["video_metadata"].append(metadata)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more: dict[str, Any] = {"images": images} if images else {}
        if type(processor).__name__ in OMNI:  # without it, times would be those of another rate
            more["fps"] = 2.0
        given["videos"] = [given["videos"]]
        found = processor(text=[words], do_sample_frames=False, return_tensors="pt", **given, **more)
    if images and type(processor).__name__ == "SmolVLMProcessor":  # it returns the pixels of videos alone
        own = processor(text=["<image>"], images=images, return_tensors="pt")
        for name in ("pixel_values", "pixel_attention_mask"):
            found[name] = torch.cat([found[name], own[name]], dim=1)
    return found


def our_prompt(engine: Engine, contents: Sequence[Any], files: Sequence[Any]) -> list[int]:
    assert engine.images is not None
    assert engine.tokenizer is not None
    chat = ChatImages.of(engine.images.arch, engine.images.processor, engine.tokenizer, engine.images.videos)
    options: dict[str, Any] = {"defaults": SamplingParams(), "has_own_limit": False, "streams": False}
    reader = RequestReader(engine.tokenizer, max_length=2000, images=chat, **options)
    kinds = [part["type"] for part in contents if part in (IMAGE, VIDEO)]
    images = [
        MediaInput(f"file {i}", data_url(data), kind=kind)
        for i, (kind, data) in enumerate(zip(kinds, files, strict=True))
    ]
    messages = [{"role": "user", "content": [*contents]}]
    return list(reader.generate(encode_request(Generate(messages=messages, files=images)), None).prompts[0])


def encoded(engine: Engine, contents: Sequence[Any], files: Sequence[Any]) -> list[Any]:
    kinds = [part["type"] for part in contents if part in (IMAGE, VIDEO)]
    return engine.encode_images([file_of(*one) for one in zip(kinds, files, strict=True)])


def file_of(kind: str, data: Any) -> ImageFile | VideoFile:
    if isinstance(data, tuple):
        return VideoFile(frames=data, name="a video")
    return VideoFile(data=data, name="a video") if kind == "video" else ImageFile(data=data, name="an image")


@pytest.fixture(scope="module", params=VIDEO_KINDS)
def made(request, tmp_path_factory):
    kind = VIDEO_KINDS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)  # a package for its texts
        for name in ("Qwen2_5Omni", "Qwen3OmniMoe"):  # which have no limits in their files
            patch.setattr(f"transformers.{name}Processor.videos_kwargs", VIDEO_SIZES, raising=False)
        folder = tmp_path_factory.mktemp("videos")
        reference = write_pretrained_vision_model(folder, kind)
        yield folder, reference, Engine.from_pretrained(folder, compile=False, device="cpu", block_size=4)


def chats_of(engine: Engine) -> list[Any]:
    """Those that transformers can read: one file, one image and one video, or more."""
    reader = engine.images.arch.reader
    if reader.reads_one:
        return CHATS[:1]
    (contents, files), is_joined = CHATS[1], reader.model_type == "smolvlm"
    return [CHATS[0], (contents[:4], files[:2]) if is_joined else (contents, files)]


def test_chats_with_videos_are_those_of_transformers(made):
    folder, reference, engine = made
    assert engine.images.videos is not None
    for contents, files in chats_of(engine):
        inputs = their_inputs(folder, contents, files, engine.images.videos)
        ids = our_prompt(engine, contents, files)
        assert ids == inputs["input_ids"][0].tolist()
        [found] = engine.generate([ids], GREEDY, logprobs=1, media=[encoded(engine, contents, files)])
        check(reference, inputs, ids, found)


def check(reference: Any, inputs: Any, ids: list[int], found: Any) -> None:
    full = torch.tensor([[*ids, *found.token_ids]])
    given = {key: value.float() if value.is_floating_point() else value for key, value in inputs.items()}
    given |= {"input_ids": full, "attention_mask": torch.ones_like(full)}
    if "mm_token_type_ids" in given:
        given["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, 30))
    if hasattr(reference.model, "rope_deltas"):
        reference.model.rope_deltas = None
    if hasattr(reference, "create_masks_for_generate"):  # plain calls mask otherwise (Gemma 4 unified)
        embedded = torch.zeros(*full.shape, reference.config.text_config.hidden_size)
        own = {name: given.get(name) for name in ("attention_mask", "mm_token_type_ids")}
        given["attention_mask"] = reference.create_masks_for_generate(
            reference.config, embedded, past_key_values=None, position_ids=None, **own
        )
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        if {
            "image_grid_thw",
            "video_grid_thw",
            "mm_token_type_ids",
        } <= given.keys():  # GLM: it takes the tokens of both for each other's
            types = given["mm_token_type_ids"].unsqueeze(-1)
            patch.setattr(reference.model, "get_placeholder_mask", lambda *_, **__: (types == 1, types == 2))
        if "num_frames_per_video" in given:  # Gemma 4, whose forward does not hand it over
            names = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
            own = reference.model.get_video_features(**{name: given.pop(name) for name in names}, return_dict=True)
            patch.setattr(reference.model, "get_video_features", lambda *_, **__: own)
            given["pixel_values_videos"] = torch.zeros(1)
        logits = reference(**given).logits[0, len(ids) - 1 : -1].float()
    assert found.token_ids == logits.argmax(-1).tolist()
    if found.tokens is not None:
        expected = logits.log_softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor([one.logprob for one in found.tokens]), expected, atol=1e-4, rtol=0)


def test_chunks_and_cached_prefixes_change_nothing(made):
    folder, reference, _ = made
    engine = Engine.from_pretrained(folder, compile=False, device="cpu", block_size=4, max_step_tokens=18)
    contents, files = chats_of(engine)[-1]
    inputs = their_inputs(folder, contents, files, engine.images.videos)
    ids = our_prompt(engine, contents, files)
    for _ in range(2):
        [found] = engine.generate([ids], GREEDY, media=[encoded(engine, contents, files)])
        check(reference, inputs, ids, found)
    assert found.counts.num_cached == (len(ids) - 1) // 4 * 4


def test_frames_that_come_as_images_are_all_read(made):
    engine = made[2]
    frames = jpegs(6, 64, 48)
    assert engine.images.videos.places(file_of("video", frames), facts_of(file_of("video", frames))) == (*range(6),)
    contents = [VIDEO, text("What?")]
    ids, images = our_prompt(engine, contents, (frames,)), encoded(engine, contents, (frames,))
    [found] = engine.generate([ids], GREEDY, media=[images])
    assert len(found.token_ids) == 30


def test_videos_are_encoded_in_bfloat16(made):
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", dtype="bfloat16")
    [found] = encoded(engine, [VIDEO], (CLIP,))
    assert found.features.dtype == torch.bfloat16
    assert found.features.isfinite().all()


def test_the_frames_are_those_that_its_processor_chooses(made):
    """Where the files say how many, and where frames are fewer than that."""
    from transformers.video_utils import VideoMetadata

    folder, _, engine = made
    del folder
    processor = engine.images.videos._videos
    for data in (CLIP, LONG):
        facts = facts_of(VideoFile(data=data, name=""))
        found = engine.images.videos.places(VideoFile(data=data, name=""), facts)
        times_are_positions = engine.images.arch.steps_per_second is not None
        if processor.num_frames is None and processor.fps is None and not times_are_positions:
            assert len(found) == min(engine.images.arch.reader.videos.num_frames, facts.num_frames)
            continue
        metadata = VideoMetadata(
            total_num_frames=facts.num_frames, fps=facts.rate, duration=facts.num_frames / facts.rate
        )
        frames = [frames_of(data)]
        rate = {"fps": 2.0} if times_are_positions else {}
        inputs = processor(frames, video_metadata=[metadata], do_sample_frames=True, return_metadata=True, **rate)
        assert [*found] == [int(place) for place in inputs["video_metadata"][0].frames_indices]
