"""Qwen-Omni: images, videos and sounds in one chat are those of transformers' thinker; what speaks is left out."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

pytest.importorskip("av")
pytest.importorskip("torchvision")

from flambeau.handlers.generation.media_files import to_file
from flambeau.llm.checkpoints.checkpoint import read_architecture
from flambeau.llm.core.outputs import Completion
from flambeau.llm.core.sequence import EncodedMedia
from flambeau.llm.engine import Engine
from flambeau.llm.sampling_params import SamplingParams
from flambeau.wire.generation import Generate, MediaInput, encode_request
from support.omni_models import OMNI_KINDS, VIDEO_SIZES
from support.pictures import jpeg
from support.pretrained_vision_models import write_pretrained_vision_model
from support.ranks import run_ranks
from support.sound_models import RATE, samples_of, wav
from support.videos import data_url, frames_of, video
from unit.llm.images.test_pretrained_images import check
from unit.llm.sounds.test_pretrained_sounds import reader_of, samples_in

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SOUND, OTHER_SOUND = wav(samples_of(1, 1.7)), wav(samples_of(2, 1.7))
PICTURE, CLIP = jpeg(1, 60, 44), video(1, 64, 48, 18, 6)
URLS = {"image": "data:image/jpeg;base64,", "audio": "data:audio/wav;base64,"}


def part(kind: str) -> dict[str, str]:
    return {"type": kind}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


ALL = ([part("audio"), text("and "), part("image"), text("so"), part("video"), text("or")], (SOUND, PICTURE, CLIP))
LAST = ([part("image"), text("x "), part("video"), part("audio"), text("What?")], (PICTURE, CLIP, SOUND))
OTHER = (LAST[0], (PICTURE, CLIP, OTHER_SOUND))
ONE = ([text("Hear "), part("audio")], (OTHER_SOUND,))
NONE = ([text("Whether 'tis nobler")], ())
TYPE = {"video_processor_type": "Qwen2VLVideoProcessor"}
Chat = tuple[Sequence[Any], Sequence[bytes]]


@pytest.fixture(scope="module", params=OMNI_KINDS)
def made(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Qwen2_5Omni", "Qwen3OmniMoe"):  # which have no limits in their files
            patch.setattr(f"transformers.{name}Processor.videos_kwargs", VIDEO_SIZES, raising=False)
        folder = tmp_path_factory.mktemp("omni")
        reference = write_pretrained_vision_model(folder, OMNI_KINDS[request.param])
        yield folder, reference, make(folder)


def make(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, compile=False, device="cpu", block_size=4, **options)


def kinds_of(contents: Sequence[Any]) -> list[str]:
    return [one["type"] for one in contents if one["type"] != "text"]


def ours(engine: Engine, chat: Chat) -> tuple[list[int], list[EncodedMedia]]:
    contents, files = chat
    given = [
        MediaInput(
            f"file {i}",
            data_url(data) if kind == "video" else URLS[kind] + base64.b64encode(data).decode(),
            kind="sound" if kind == "audio" else kind,
        )
        for i, (kind, data) in enumerate(zip(kinds_of(contents), files, strict=True))
    ]
    request = encode_request(Generate(messages=[{"role": "user", "content": [*contents]}], files=given))
    found = reader_of(engine).generate(request, None)
    return found.prompts[0], [
        *engine.encode_images([*map(to_file, found.files.images)]),
        *engine.encode_sounds(found.files.sounds),
    ]


def theirs(folder: Path, engine: Engine, chat: Chat) -> Any:
    import transformers
    from transformers.video_utils import VideoMetadata

    contents, files = chat
    processor = transformers.AutoProcessor.from_pretrained(folder)
    processor.image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    words = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": [*contents]}], tokenize=False, add_generation_prompt=True
    )
    given: dict[str, Any] = {}
    for kind, data in zip(kinds_of(contents), files, strict=True):
        if kind == "image":
            given.setdefault("images", []).append(Image.open(io.BytesIO(data)).convert("RGB"))
        elif kind == "audio":
            given.setdefault("audio", []).append(samples_in(data))
        else:
            frames = frames_of(data)
            metadata = VideoMetadata(total_num_frames=len(frames), fps=6.0, duration=len(frames) / 6)
            own = engine.images.videos._videos  # type: ignore[union-attr]
            metadata.frames_indices = own.sample_frames(metadata=metadata, fps=2.0).tolist()
            given |= {"videos": [[frames[metadata.frames_indices]]], "video_metadata": [metadata], "fps": 2.0}
    return processor(text=[words], do_sample_frames=False, return_tensors="pt", **given)


def logits_of(reference: Any, inputs: Any, ids: Sequence[int]) -> torch.Tensor:
    every = torch.tensor([ids])
    reference.model.rope_deltas = None
    given = {**inputs, "input_ids": every, "attention_mask": torch.ones_like(every)}
    with torch.inference_mode():
        return reference(**given).logits[0].float()


def check_chat(made: Any, engine: Engine, chat: Chat, ids: list[int], found: Any) -> None:
    folder, reference, _ = made
    inputs = theirs(folder, engine, chat)
    assert ids == inputs["input_ids"][0].tolist()
    check(found, logits_of(reference, inputs, [*ids, *found.token_ids])[len(ids) - 1 : -1])


@pytest.mark.parametrize("max_step_tokens", [13, 500])
def test_files_of_all_kinds_in_one_chat_are_those_of_transformers(made, max_step_tokens):
    engine = make(made[0], max_step_tokens=max_step_tokens)
    chats = [ALL, NONE, LAST, ONE]
    prompts, media = zip(*(ours(engine, chat) for chat in chats), strict=True)
    found = engine.generate(prompts, GREEDY, logprobs=1, media=media)
    for chat, ids, completion in zip(chats, prompts, found, strict=True):
        check_chat(made, engine, chat, ids, completion)


def test_a_cached_prefix_ends_where_another_sound_begins(made):
    engine = make(made[0])
    ids, media = ours(engine, LAST)
    for _ in range(2):
        [again] = engine.generate([ids], GREEDY, media=[media])
        check_chat(made, engine, LAST, ids, again)
    assert again.counts.num_cached == (len(ids) - 1) // 4 * 4
    same_ids, others = ours(engine, OTHER)
    assert same_ids == ids
    [found] = engine.generate([ids], GREEDY, media=[others])
    check_chat(made, engine, OTHER, ids, found)
    assert found.counts.num_cached == ids.index(engine.sounds.arch.sound_id) // 4 * 4


RANK = """
import base64, json, os, sys
import numpy as np
import torch
from pathlib import Path
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.loader import load_engine, load_follower
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.sounds.sound_clip import SoundClip

torch.set_num_threads(1)
folder, (prompts, picture) = Path(sys.argv[1]), json.loads(sys.argv[3])
options = {"tensor_parallel_size": 2, "num_blocks": 100, "block_size": 4, "compile": False, "device": "cpu"}
if os.environ["RANK"] != "0":
    load_follower(folder, **options)()
else:
    engine = load_engine(folder, **options)
    sound = SoundClip(samples=np.load(folder / "sound.npy"), rate=16000, name="")
    images = engine.encode_images([ImageFile(data=base64.b64decode(picture), name="")])
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    media = [[*images, *engine.encode_sounds([sound])], engine.encode_sounds([sound])]
    print(json.dumps([each.token_ids for each in engine.generate(prompts, params, media=media)]))
    engine.close()
"""


def test_two_ranks_read_images_and_sounds(made):
    folder, _, engine = made
    chats = [([part("image"), part("audio"), text("so")], (PICTURE, OTHER_SOUND)), ONE]
    prompts = [ours(engine, chat)[0] for chat in chats]
    np.save(folder / "sound.npy", samples_in(OTHER_SOUND))
    [found] = run_ranks(folder, 2, RANK, [prompts, base64.b64encode(PICTURE).decode()])
    for chat, ids, tokens in zip(chats, prompts, found, strict=True):
        check_chat(made, engine, chat, ids, Completion(token_ids=tokens))


def test_files_of_the_whole_model_are_read_without_what_speaks(made, tmp_path, caplog):
    folder, _, expected = made
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    name = config["architectures"][0].replace("Thinker", "")
    whole = {
        "architectures": [name],
        "model_type": config["model_type"].removesuffix("_thinker"),
        "thinker_config": {key: value for key, value in config.items() if key != "dtype"},
        "dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    named = {f"thinker.{key}": one for key, one in tensors.items()}
    more = {"talker.model.norm.weight": torch.ones(4), "code2wav.a.weight": torch.ones(4).to(torch.float8_e4m3fn)}
    save_file({**named, **more}, tmp_path / "model.safetensors", {"format": "pt"})
    engine = make(tmp_path)
    assert "2 tensors of what speaks or paints are left out" in caplog.text
    assert "does not use" not in caplog.text
    ids, media = ours(engine, ALL)
    assert torch.equal(media[0].features, ours(expected, ALL)[1][0].features)
    [found] = engine.generate([ids], GREEDY, media=[media])
    check_chat(made, engine, ALL, ids, found)


def test_older_names_of_the_class_and_of_weights_are_known(made, tmp_path):
    folder, _, _ = made
    config = json.loads((folder / "config.json").read_text())
    assert read_architecture(folder).vision is not None
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2_5OmniModel"]}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert read_architecture(tmp_path).num_layers == 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_frames": 8}, "num_frames is not supported"),
        ({"fps": 3}, "has to make it a whole number"),
    ],
)
def test_videos_with_other_times_than_those_of_transformers_are_refused(made, tmp_path, caplog, settings, reason):
    for file in made[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({**TYPE, **settings}))
    engine = make(tmp_path)
    assert engine.images is not None
    assert engine.images.videos is None
    assert reason in caplog.text


def test_sounds_within_videos_are_refused_by_name(made, monkeypatch):
    videos = made[2].images.videos
    monkeypatch.setattr(videos._processor, "load_audio_from_video", True)
    with pytest.raises(ValueError, match="load_audio_from_video is not supported"):
        videos.try_out()


def test_the_rate_of_sounds_is_that_of_the_model(made):
    assert made[2].sounds.processor.rate == RATE
