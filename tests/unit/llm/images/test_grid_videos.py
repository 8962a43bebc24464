"""An engine with a Qwen-VL reads videos as transformers does: frames, prompts, positions, and the text behind them."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("av")
pytest.importorskip("torchvision")

from flambeau.handlers.generation.chat_images import ChatImages
from flambeau.llm.core.outputs import Completion
from flambeau.llm.engine import Engine
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.images.processors import read_video_processor
from flambeau.llm.images.video_files import VideoFacts, VideoFile
from flambeau.llm.sampling_params import SamplingParams
from support.grid_vision_models import (
    IMAGE,
    NAMES,
    PATCH,
    PROCESSOR,
    VIDEO,
    grid_processor_of,
    write_grid_model,
)
from support.pictures import jpeg
from support.videos import frames_of, jpegs, video

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
KINDS = ("qwen_2", "qwen_2.5", "qwen_3", "qwen_3.5")
CLIP, TALL, FRAMES = video(1), video(2, 48, 80, 11, 4), jpegs(5)
PICTURE = jpeg(1, 50, 75)


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory) -> tuple[Any, Any, str]:
    folder = tmp_path_factory.mktemp("qwen")
    return folder, write_grid_model(folder, request.param), request.param


@pytest.fixture(scope="module")
def engine(made) -> Engine:
    return Engine.from_pretrained(made[0], compile=False, device="cpu", block_size=4)


def is_picture(data: bytes | tuple[bytes, ...]) -> bool:
    return isinstance(data, bytes) and data[:2] == b"\xff\xd8"


def file(data: bytes | tuple[bytes, ...], name: str = "video") -> VideoFile | ImageFile:
    if isinstance(data, tuple):
        return VideoFile(frames=data, name=name)
    return ImageFile(data=data, name=name) if is_picture(data) else VideoFile(data=data, name=name)


def metadata_of(frames: Any, rate: float) -> Any:
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(total_num_frames=len(frames), fps=rate, duration=len(frames) / rate)


def their_inputs(made: Any, parts: tuple[Any, ...]) -> Any:
    """What transformers makes of a chat; a video is a pair of its file and its frames a second."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": kind_of(part)} for part in parts]
    processor = grid_processor_of(made[0], made[2])
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    images = [Image.open(io.BytesIO(part)).convert("RGB") for part in parts if kind_of(part) == "image"]
    videos = [(frames_of(part[0]), part[1]) for part in parts if kind_of(part) == "video"]
    given: dict[str, Any] = {"images": images} if images else {}
    if videos:
        given["videos"] = [frames for frames, _ in videos]
        given["video_metadata"] = [metadata_of(*one) for one in videos]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return processor(text=[text], return_tensors="pt", **given)


def kind_of(part: Any) -> str:
    return "video" if isinstance(part, tuple) else "image" if isinstance(part, bytes) else "text"


def our_prompt(engine: Engine, parts: tuple[Any, ...]) -> tuple[list[int], list[Any]]:
    """The ids of a chat and its encoded images and videos."""
    assert engine.images is not None
    assert engine.tokenizer is not None
    chat = ChatImages.of(engine.images.arch, engine.images.processor, engine.tokenizer, engine.images.videos)
    files = [file(part[0] if isinstance(part, tuple) else part) for part in parts if not isinstance(part, str)]
    texts: dict[str, list[str]] = {}
    for one in files:
        if isinstance(one, VideoFile):
            assert chat.videos is not None
            texts.setdefault(chat.videos.marker, []).append(chat.videos.text(one))
        else:
            texts.setdefault(chat.marker, []).append(chat.token * chat.processor.num_tokens(one))
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": kind_of(part)} for part in parts]
    messages = [{"role": "user", "content": content}]
    ids = engine.tokenizer.encode_chat(messages, add_generation_prompt=True, expansions=texts)
    return ids, engine.encode_images(files)


CHATS: dict[str, tuple[Any, ...]] = {
    "a video": ("What is ", (CLIP, 6), " this?"),
    "with an image": ((CLIP, 6), "Well, ", PICTURE, " and ", (TALL, 4), "so"),
    "side by side": ("a", PICTURE, (TALL, 4), (CLIP, 6)),
}


@pytest.mark.parametrize("name", CHATS)
def test_prompts_and_tokens_are_those_of_transformers(made, engine, name):
    """Prompts, embeddings and positions: the tokens that follow are its own."""
    theirs = their_inputs(made, CHATS[name])
    ids, encoded = our_prompt(engine, CHATS[name])
    assert ids == theirs["input_ids"][0].tolist()
    [found] = engine.generate([ids], GREEDY, logprobs=1, media=[encoded])
    check(made, theirs, ids, found)


def check(made: Any, theirs: Any, ids: list[int], found: Completion, **more: Any) -> None:
    given = {k: v for k, v in theirs.items() if k not in ("input_ids", "attention_mask", "mm_token_type_ids")}
    full = [*ids, *found.token_ids]
    types = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in full]])
    made[1].model.rope_deltas = None
    with torch.inference_mode():
        logits = made[1](torch.tensor([full]), mm_token_type_ids=types, **given, **more).logits[0]
    expected = logits[len(ids) - 1 : -1].float()
    assert len(found.token_ids) == 30
    assert found.token_ids == expected.argmax(-1).tolist()
    if found.tokens is not None:
        logprobs = expected.log_softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor([one.logprob for one in found.tokens]), logprobs, atol=1e-4, rtol=0)


def test_generate_of_transformers_gives_the_same_text(made, engine):
    theirs = their_inputs(made, CHATS["with an image"])
    ids, encoded = our_prompt(engine, CHATS["with an image"])
    [found] = engine.generate([ids], GREEDY, media=[encoded])
    made[1].model.rope_deltas = None
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = made[1].generate(**theirs, max_new_tokens=30, min_new_tokens=30, **options)
    assert found.token_ids == expected[0, len(ids) :].tolist()


def test_embeddings_are_those_of_transformers(made, engine):
    theirs = their_inputs(made, CHATS["a video"])
    [found] = engine.encode_images([file(CLIP)])
    with torch.inference_mode():
        expected = made[1].model.get_video_features(theirs["pixel_values_videos"], theirs["video_grid_thw"])
    deep = getattr(expected, "deepstack_features", None) or ()
    wanted = torch.cat([expected.pooler_output[0], *(layer[0] for layer in deep)], dim=-1)
    torch.testing.assert_close(found.features, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("made", ["qwen_2.5", "qwen_3"], indirect=True)
def test_steps_are_encoded_in_parts_as_at_once(made, engine, monkeypatch):
    [whole] = engine.encode_images([file(TALL)])
    monkeypatch.setattr("flambeau.llm.images.grid_video_processor.MAX_STEP_PATCHES", 1)
    other = Engine.from_pretrained(made[0], compile=False, device="cpu")
    torch.testing.assert_close(other.encode_images([file(TALL)])[0].features, whole.features, atol=1e-5, rtol=0)


def test_chunks_and_cached_prefixes_change_nothing(made):
    """Chunks end within videos, too; the same video again comes from the cache, and another one does not."""
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", max_step_tokens=18, block_size=4)
    names = ["a video", "with an image", "side by side"]
    prompts, images = zip(*(our_prompt(engine, CHATS[name]) for name in names), strict=True)
    found = engine.generate(prompts, GREEDY, media=images)
    for name, ids, completion in zip(names, prompts, found, strict=True):
        check(made, their_inputs(made, CHATS[name]), ids, completion)
    [again] = engine.generate(prompts[:1], GREEDY, media=images[:1])
    assert again.token_ids == found[0].token_ids
    if made[2] != "qwen_3.5":  # states of such short prompts are not kept
        assert again.counts.num_cached == (len(prompts[0]) - 1) // 4 * 4
    other = ("What is ", (video(7), 6), " this?")
    ids, encoded = our_prompt(engine, other)
    [found_other] = engine.generate([ids], GREEDY, media=[encoded])
    check(made, their_inputs(made, other), ids, found_other)


@pytest.mark.parametrize("made", ["qwen_2.5", "qwen_3.5"], indirect=True)
def test_speculation_changes_nothing(made):
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", speculation="lookup", speculate_k=3)
    ids, encoded = our_prompt(engine, CHATS["with an image"])
    [found] = engine.generate([ids], GREEDY, media=[encoded])
    check(made, their_inputs(made, CHATS["with an image"]), ids, found)


@pytest.mark.parametrize("made", ["qwen_2.5", "qwen_3.5"], indirect=True)
def test_the_kernels_of_the_cpu_decode_behind_videos(made):
    engine = Engine.from_pretrained(made[0], device="cpu", max_step_tokens=32)
    try:
        engine.wait_until_compiled()
        ids, encoded = our_prompt(engine, CHATS["with an image"])
        [found] = engine.generate([ids], GREEDY, media=[encoded])
        check(made, their_inputs(made, CHATS["with an image"]), ids, found)
    finally:
        engine.close()


@pytest.mark.parametrize("made", ["qwen_2", "qwen_2.5"], indirect=True)
def test_text_behind_a_long_video_goes_on_behind_its_time(made):
    """As in the models' own code; transformers 5 counts rows and columns alone there. Positions before are negative."""
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu")
    parts = ("What is ", (video(3, 40, 24, 96, 4), 4), " this?")  # 24 steps of 15 tokens at most
    theirs = their_inputs(made, parts)
    ids, encoded = our_prompt(engine, parts)
    assert ids == theirs["input_ids"][0].tolist()
    [found] = engine.generate([ids], GREEDY, logprobs=1, media=[encoded])
    steps, rows, columns = (theirs["video_grid_thw"][0] // torch.tensor([1, 2, 2])).tolist()
    interval = 1 if made[2] == "qwen_2" else 4
    start, number = ids.index(VIDEO), steps * rows * columns
    places = torch.stack(torch.meshgrid(*map(torch.arange, (steps, rows, columns)), indexing="ij")).flatten(1)
    own = places * torch.tensor([[interval], [1], [1]]) + start
    last = int(own.max()) + 1
    assert last - start > max(rows, columns)
    behind = torch.arange(len(ids) + 30 - start - number) + last
    positions = torch.cat([torch.arange(start).expand(3, -1), own, behind.expand(3, -1)], dim=1)
    check(made, theirs, ids, found, position_ids=positions[:, None])


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((33, 90, 3, 30), {}),
        ((200, 150, 50, 25), {}),
        ((6, 20, 7, 1), {}),
        ((120, 40, 12, 6), {"cap_pixels_per_frame": True, "resample": 2}),
        ((48, 80, 11, 4), {"num_frames": 6, "fps": None}),
    ],
)
@pytest.mark.parametrize("made", ["qwen_2.5", "qwen_3"], indirect=True)
def test_frames_are_those_of_transformers(made, tmp_path, monkeypatch, shape, changes):
    """Which ones, their sizes, their patches and the text, for files of many shapes."""
    data = video(1, *(shape[0] // 2 * 2, shape[1] // 2 * 2), *shape[2:])
    name = "video_preprocessor_config.json" if made[2] == "qwen_3" else "preprocessor_config.json"
    described = {**json.loads((made[0] / name).read_text()), **changes}
    (tmp_path / name).write_text(json.dumps(described))
    processor = read_video_processor(tmp_path, Engine.from_pretrained(made[0], compile=False).images.arch)
    assert processor is not None
    theirs = grid_processor_of(made[0], made[2])
    for key, value in changes.items():
        setattr(theirs.video_processor, key, value)
    frames = frames_of(data)
    inputs = theirs(
        text=[f"a{NAMES[VIDEO]}"], videos=[frames], video_metadata=[metadata_of(frames, shape[3])], return_tensors="pt"
    )
    read = processor.read(VideoFile(data=data, name="video"))
    patches = torch.cat([*read.pixels()])
    assert [len(patches) // (read.grid[0] * read.grid[1]), *read.grid] == inputs["video_grid_thw"][0].tolist()
    np.testing.assert_allclose(patches.numpy(), inputs["pixel_values_videos"], atol=1e-5)
    text = processor.text_of(VideoFile(data=data, name="video"), NAMES[VIDEO], (NAMES[3], NAMES[4]))
    assert theirs.tokenizer(f"a{text}")["input_ids"] == inputs["input_ids"][0].tolist()


def test_frames_that_come_as_images_are_all_read(made, engine):
    """Two a second."""
    [found] = engine.encode_images([file(FRAMES)])
    processor = grid_processor_of(made[0], made[2])
    frames = np.stack([np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in FRAMES])
    given = {"do_sample_frames": False, "video_metadata": [metadata_of(frames, 2.0)]}
    given["video_metadata"][0].frames_indices = [*range(5)]
    inputs = processor(text=[NAMES[VIDEO]], videos=[frames], return_tensors="pt", **given)
    with torch.inference_mode():
        expected = made[1].model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    torch.testing.assert_close(found.features[:, :32], expected.pooler_output[0], atol=1e-4, rtol=0)
    text = engine.images.videos.text_of(file(FRAMES), NAMES[VIDEO], (NAMES[3], NAMES[4]))
    assert processor.tokenizer(text)["input_ids"] == inputs["input_ids"][0].tolist()


@pytest.mark.parametrize("made", ["qwen_2.5"], indirect=True)
def test_embeddings_are_kept_by_content_and_settings(made, engine, tmp_path):
    digest = engine.images.digest(file(CLIP))
    assert engine.encode_images([file(CLIP)])[0] is engine.encode_images([file(CLIP)])[0]
    others = [file(TALL), file(FRAMES), file(FRAMES[:4]), VideoFile(frames=(CLIP,), name="")]
    assert len({digest, *map(engine.images.digest, others)}) == 5
    other = Engine.from_pretrained(made[0], compile=False, device="cpu")
    assert other.images.digest(file(CLIP)) == digest
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "fps": 1}))
    other.images.videos = read_video_processor(tmp_path, other.images.arch)
    assert other.images.digest(file(CLIP)) != digest


@pytest.mark.parametrize("made", ["qwen_2.5"], indirect=True)
def test_an_image_in_the_place_of_a_video_is_rejected(made, engine):
    ids, encoded = our_prompt(engine, CHATS["a video"])
    image = type(encoded[0])(b"", encoded[0].features, encoded[0].grid)
    with pytest.raises(InvalidRequest, match="send images in the messages of a chat"):
        engine.generate([ids], GREEDY, media=[[image]])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fps": 2, "num_frames": 8}, "both fps 2"),
        ({"do_pan": True}, "do_pan"),
        ({"resample": 1}, "resample"),
        ({"num_frames": 1}, "num_frames must be a whole number from 2, not 1"),  # two of them are one step
        ({"max_frames": 1}, "max_frames must be a whole number from 2"),
        ({"min_frames": 1}, "min_frames must be a whole number from 2"),
    ],
)
@pytest.mark.parametrize("made", ["qwen_2.5"], indirect=True)
def test_settings_that_are_not_known_leave_videos_out(made, tmp_path, caplog, changes, reason):
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **changes}))
    assert read_video_processor(tmp_path, Engine.from_pretrained(made[0], compile=False).images.arch) is None
    assert reason in caplog.text


@pytest.mark.parametrize("made", ["qwen_2.5", "qwen_3"], indirect=True)
def test_what_the_files_leave_out_is_what_transformers_has(made, tmp_path):
    """But for the two frames a second of the older ones."""
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

    cls = Qwen3VLVideoProcessor if made[2] == "qwen_3" else Qwen2VLVideoProcessor
    arch = Engine.from_pretrained(made[0], compile=False).images.arch
    found = []
    for described in ({"patch_size": PATCH}, json.loads(cls(patch_size=PATCH).to_json_string())):
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(described))
        found.append(read_video_processor(tmp_path, arch))
    assert found[0] is not None
    assert found[0] == found[1]
    assert found[0].sampling.rate == 2


@pytest.mark.parametrize("made", ["qwen_2.5"], indirect=True)
def test_a_video_of_fewer_frames_than_a_step_is_refused(made, engine):
    videos = engine.images.videos
    four = replace(videos, frames=4, sampling=replace(videos.sampling, multiple=4))
    with pytest.raises(InvalidRequest, match="is a video of 3 frames; send at least 4"):
        four.places(file(CLIP), VideoFacts(num_frames=3, rate=2.0, size=(40, 120)))
