"""Two ranks read images as one does: the first encodes, both rotate by rows and columns."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flambeau.llm.engine import Engine
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.sampling_params import SamplingParams
from support.grid_vision_models import grid_prompt, write_grid_model
from support.pictures import jpeg

RANK = """
import json, os, sys
import torch
from pathlib import Path
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.loader import load_engine, load_follower

torch.set_num_threads(1)
folder, prompts = Path(sys.argv[1]), json.loads(sys.argv[2])
options = {"tensor_parallel_size": 2, "num_blocks": 100, "block_size": 4, "compile": False, "device": "cpu"}
options["max_step_tokens"] = 20
if os.environ["RANK"] != "0":
    load_follower(folder, **options)()
else:
    engine = load_engine(folder, **options)
    files = [ImageFile(data=path.read_bytes(), name=path.name) for path in sorted(folder.glob("*.jpg"))]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = engine.generate(prompts, params, images=[engine.encode_images(files), []])
    print(json.dumps([completion.token_ids for completion in found]))
    engine.close()
"""


@pytest.mark.parametrize("kind", ["qwen_2.5", "qwen_3"])
def test_two_ranks_give_the_tokens_of_one(tmp_path, kind):
    write_grid_model(tmp_path, kind)
    images = [jpeg(1, 120, 40), jpeg(2, 50, 75)]
    for number, image in enumerate(images):
        (tmp_path / f"{number}.jpg").write_bytes(image)
    alone = Engine.from_pretrained(tmp_path, compile=False, device="cpu")
    encoded = alone.encode_images([ImageFile(data=image, name="") for image in images])
    first, second = (len(image.features) for image in encoded)
    prompts = [grid_prompt([*range(20, 50)], first, [50], second, [60, 61]), [*range(30, 60)]]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = [one.token_ids for one in alone.generate(prompts, params, images=[encoded, []])]
    assert run_ranks(tmp_path, prompts) == expected


def run_ranks(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", RANK, str(folder), json.dumps(prompts)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **meeting, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    found: list[list[int]] = json.loads(outputs[0].decode().splitlines()[-1])
    return found
