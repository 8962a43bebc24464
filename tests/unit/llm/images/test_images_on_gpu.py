"""Images on a GPU say what they say on a CPU, in float32, also while steps and other images run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flambeau.llm import Engine, SamplingParams
from flambeau.llm.images.image_files import ImageFile
from support.grid_vision_models import KINDS, grid_prompt, write_grid_model
from support.pictures import jpeg
from support.vision_models import prompt_with, write_vision_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # the compiler's own
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPTS = [prompt_with([25], None, [50, 60, 70, 80], None, [90, 100]), prompt_with([*range(30, 60)])]


def files(*seeds: int) -> list[ImageFile]:
    return [ImageFile(data=jpeg(seed), name=str(seed)) for seed in seeds]


def test_tokens_are_those_of_a_cpu_while_steps_are_captured(tmp_path):
    write_vision_model(tmp_path)
    on_cpu = Engine.from_pretrained(tmp_path, device="cpu", compile=False)
    on_gpu = Engine.from_pretrained(tmp_path, device="cuda", dtype="float32", num_blocks=512)
    images = on_cpu.encode_images(files(1, 2))
    expected = [one.token_ids for one in on_cpu.generate(PROMPTS, GREEDY, media=[images, []])]
    with ThreadPoolExecutor(1) as thread:
        others = [thread.submit(on_gpu.encode_images, files(seed)) for seed in range(3, 40)]
        for _ in range(4):  # graphs are captured between these steps
            found = on_gpu.generate(PROMPTS, GREEDY, media=[on_gpu.encode_images(files(1, 2)), []])
            assert [one.token_ids for one in found] == expected
            on_gpu.wait_until_compiled()
        features = [other.result()[0].features for other in others]
    for seed, own in zip(range(3, 40), features, strict=True):
        assert own.device.type == "cpu"
        torch.testing.assert_close(own, on_cpu.encode_images(files(seed))[0].features, atol=1e-3, rtol=0)
    on_gpu.close()


@pytest.mark.parametrize("kind", KINDS[:4])  # those without recurrent layers, which Inductor compiles
def test_images_of_any_size_say_what_they_say_on_a_cpu(tmp_path, kind):
    write_grid_model(tmp_path, kind)
    on_cpu = Engine.from_pretrained(tmp_path, device="cpu", compile=False)
    on_gpu = Engine.from_pretrained(tmp_path, device="cuda", dtype="float32", num_blocks=512, max_step_tokens=32)
    found = []
    for engine in (on_cpu, on_gpu):
        images = engine.encode_images([ImageFile(data=jpeg(*size), name="") for size in ((1, 120, 40), (2, 50, 75))])
        first, second = (len(image.features) for image in images)
        prompts = [grid_prompt([25], first, [50, 60, 70], second, [*range(100, 200)]), [*range(30, 60)]]
        engine.generate(prompts, GREEDY, media=[images, []])
        engine.wait_until_compiled()
        found.append([one.token_ids for one in engine.generate(prompts, GREEDY, media=[images, []])])
    assert found[0] == found[1]
    on_gpu.close()
