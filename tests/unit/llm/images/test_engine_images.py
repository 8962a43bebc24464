"""An engine reads images as transformers does: alone, among other requests, in chunks, from the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flambeau.llm.core.outputs import Completion
from flambeau.llm.core.sequence import EncodedImage
from flambeau.llm.engine import Engine
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.images.image_processor import ImageFile
from flambeau.llm.sampling_params import SamplingParams
from support.pictures import jpeg
from support.vision_models import IMAGE, TOKENS, prompt_with, write_vision_model

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
ONE = prompt_with([20, 30, 40], None, [50, 60])
TWO = prompt_with([25], None, [50, 60, 70, 80], None, [90, 100])
TEXT = prompt_with([*range(30, 60)])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("gemma")
    return folder, write_vision_model(folder)


@pytest.fixture(scope="module")
def engine(made) -> Engine:
    return Engine.from_pretrained(made[0], compile=False, device="cpu")


def encoded(engine: Engine, *seeds: int) -> list[EncodedImage]:
    return engine.encode_images([ImageFile(data=jpeg(seed), name=f"image {seed}") for seed in seeds])


def reference_logits(reference: Any, engine: Engine, ids: list[int], seeds: tuple[int, ...]) -> Tensor:
    """The logits of transformers; the pixels are ours, which test_image_processor compares."""
    assert engine.images is not None
    pixels = [engine.images._processor.pixels(ImageFile(data=jpeg(seed), name="")) for seed in seeds]
    types = torch.tensor([[int(token == IMAGE) for token in ids]])
    with torch.inference_mode():
        given = {"pixel_values": torch.stack(pixels)} if pixels else {}
        return reference(torch.tensor([ids]), token_type_ids=types, **given).logits[0].float()


def check(reference: Any, engine: Engine, prompt: list[int], seeds: tuple[int, ...], found: Completion) -> None:
    """Every generated token is the one that transformers finds most likely, with the same log-probability."""
    expected = reference_logits(reference, engine, [*prompt, *found.token_ids], seeds)[len(prompt) - 1 : -1]
    assert found.token_ids == expected.argmax(-1).tolist()
    if found.tokens is not None:
        logprobs = expected.log_softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor([one.logprob for one in found.tokens]), logprobs, atol=1e-4, rtol=0)


def test_embeddings_are_those_of_transformers(made, engine):
    assert engine.images is not None
    [image] = encoded(engine, 3)
    pixels = engine.images._processor.pixels(ImageFile(data=jpeg(3), name=""))
    with torch.inference_mode():
        expected = made[1].get_image_features(pixels.unsqueeze(0)).pooler_output[0]
    torch.testing.assert_close(image.features, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("prompt", "seeds"), [(TEXT, ()), (ONE, (1,)), (TWO, (1, 2)), (TWO, (3, 3))])
def test_tokens_are_those_of_transformers(made, engine, prompt, seeds):
    [found] = engine.generate([prompt], GREEDY, logprobs=1, images=[encoded(engine, *seeds)])
    check(made[1], engine, prompt, seeds, found)


def test_the_logits_of_a_whole_prompt_are_those_of_transformers(made, engine):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    engine.add("scored", TWO, params, scores_prompt=True, images=encoded(engine, 4, 5))
    infos = None
    while engine.has_work:
        for output in engine.step():
            infos = output.prompt_tokens or infos
    expected = reference_logits(made[1], engine, TWO, (4, 5)).log_softmax(-1)
    wanted = [float(expected[i, token]) for i, token in enumerate(TWO[1:])]
    assert infos is not None
    torch.testing.assert_close([info.logprob for info in infos], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("step_tokens", [5, 18, 64])
def test_requests_with_and_without_images_run_together_in_chunks(made, step_tokens):
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", max_step_tokens=step_tokens, block_size=4)
    prompts, seeds = [ONE, TEXT, TWO, TEXT[:9], TWO], [(1,), (), (1, 2), (), (2, 1)]
    found = engine.generate(prompts, GREEDY, images=[encoded(engine, *own) for own in seeds])
    for prompt, own, completion in zip(prompts, seeds, found, strict=True):
        check(made[1], engine, prompt, own, completion)


def test_two_images_never_share_blocks_and_the_same_image_does(made):
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", block_size=4)
    first, second = encoded(engine, 1), encoded(engine, 2)
    [before] = engine.generate([ONE], GREEDY, images=[first])
    [other] = engine.generate([ONE], GREEDY, images=[second])
    check(made[1], engine, ONE, (2,), other)
    assert other.counts is not None
    assert other.counts.num_cached == 4  # the block before the image alone
    [again] = engine.generate([ONE], GREEDY, images=[encoded(engine, 1)])
    assert again.token_ids == before.token_ids
    assert again.counts is not None
    assert again.counts.num_cached == (len(ONE) - 1) // 4 * 4


def test_an_image_whose_first_part_is_cached_is_computed_to_its_end(made):
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", block_size=8, max_step_tokens=8)
    engine.generate([ONE], GREEDY, images=[encoded(engine, 1)])
    longer = [*ONE[:-1], 77, 78, 79, 80]  # shares blocks up to the middle of the image at least
    [found] = engine.generate([longer], GREEDY, images=[encoded(engine, 1)])
    assert found.counts is not None
    assert found.counts.num_cached > 8
    check(made[1], engine, longer, (1,), found)


def test_a_preempted_request_reads_its_image_again(made):
    small = Engine.from_pretrained(made[0], compile=False, device="cpu", block_size=4, num_blocks=24)
    prompts, seeds = [ONE, [*TWO[: 3 + TOKENS + 2], 50], ONE], [(1,), (2,), (3,)]
    found = small.generate(prompts, GREEDY, images=[encoded(small, *own) for own in seeds])
    assert small.state.num_preempted > 0
    for prompt, own, completion in zip(prompts, seeds, found, strict=True):
        check(made[1], small, prompt, own, completion)


def test_several_choices_read_the_same_image(made, engine):
    found = engine.generate([ONE], GREEDY, n=3, images=[encoded(engine, 6)])
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids
    check(made[1], engine, ONE, (6,), found[0])


def test_speculation_changes_nothing(made):
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", speculation="lookup", speculate_k=3)
    [found] = engine.generate([TWO], GREEDY, images=[encoded(engine, 1, 2)])
    check(made[1], engine, TWO, (1, 2), found)


def test_the_kernels_of_the_cpu_read_images_too(made):
    engine = Engine.from_pretrained(made[0], device="cpu")
    try:
        engine.wait_until_compiled()
        found = engine.generate([TWO, TEXT], GREEDY, images=[encoded(engine, 1, 2), []])
        check(made[1], engine, TWO, (1, 2), found[0])
        check(made[1], engine, TEXT, (), found[1])
    finally:
        engine.close()


@pytest.mark.parametrize("prompt", [TEXT, ONE, [*ONE[:10], 50], prompt_with([IMAGE])])
def test_a_prompt_without_places_for_its_images_is_rejected(engine, prompt):
    images = [] if IMAGE in prompt else encoded(engine, 1)
    with pytest.raises(InvalidRequest, match="send images in the messages of a chat"):
        engine.generate([prompt], GREEDY, images=[images])
