"""Ranks read images and videos as one process does: the first encodes, all rotate by times, rows and columns."""

from __future__ import annotations

import pytest

from flambeau.llm.engine import Engine
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.images.video_files import VideoFile
from flambeau.llm.sampling_params import SamplingParams
from support.grid_vision_models import BEGIN, END, VIDEO, grid_prompt, write_grid_model
from support.pictures import jpeg
from support.ranks import run_ranks

RANK = """
import json, os, sys
import torch
from pathlib import Path
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.images.video_files import VideoFile
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.loader import load_engine, load_follower

torch.set_num_threads(1)
folder, size, prompts = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
options = {"tensor_parallel_size": size, "num_blocks": 100, "block_size": 4, "compile": False, "device": "cpu"}
options["max_step_tokens"] = 20
if os.environ["RANK"] != "0":
    load_follower(folder, **options)()
else:
    engine = load_engine(folder, **options)
    files = [ImageFile(data=path.read_bytes(), name=path.name) for path in sorted(folder.glob("*.jpg"))]
    frames = tuple(path.read_bytes() for path in sorted(folder.glob("*.jpeg")))
    files += [VideoFile(frames=frames, name="video")]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = engine.generate(prompts, params, media=[engine.encode_images(files), []])
    print(json.dumps([completion.token_ids for completion in found]))
    engine.close()
"""


FOUR = {"num_attention_heads": 4, "num_key_value_heads": 1}


@pytest.mark.parametrize(("kind", "size"), [("qwen_2.5", 2), ("qwen_3", 2), ("qwen_3.5_moe", 4)])
def test_ranks_give_the_tokens_of_one(tmp_path, kind, size):
    write_grid_model(tmp_path, kind, **(FOUR if size == 4 else {}))
    images = [jpeg(1, 120, 40), jpeg(2, 50, 75)]
    for number, image in enumerate(images):
        (tmp_path / f"{number}.jpg").write_bytes(image)
    frames = tuple(jpeg(3 + number, 48, 32) for number in range(5))
    for number, frame in enumerate(frames):
        (tmp_path / f"{number}.jpeg").write_bytes(frame)
    alone = Engine.from_pretrained(tmp_path, compile=False, device="cpu")
    files = [*(ImageFile(data=image, name="") for image in images), VideoFile(frames=frames, name="")]
    encoded = alone.encode_images(files)
    first, second, third = (len(image.features) // image.num_places for image in encoded)
    steps = [one for _ in range(encoded[2].num_places) for one in ([BEGIN, *[VIDEO] * third, END], [70])]
    prompts = [grid_prompt([*range(20, 50)], first, [50], second, *steps, [60, 61]), [*range(30, 60)]]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = [one.token_ids for one in alone.generate(prompts, params, media=[encoded, []])]
    assert run_ranks(tmp_path, size, RANK, prompts) == [expected]
