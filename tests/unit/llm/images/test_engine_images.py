"""An engine reads images as transformers does: alone, among other requests, in chunks, from the prefix cache."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flambeau.llm.core.outputs import Completion
from flambeau.llm.core.sequence import EncodedMedia
from flambeau.llm.engine import Engine
from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.images.image_encoder import FeatureCache
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.quantize.row_scaled import Int8Linear
from flambeau.llm.sampling_params import SamplingParams
from support.adapters import write_adapter
from support.pictures import jpeg
from support.ranks import run_ranks
from support.vision_models import IMAGE, TOKENS, prompt_with, write_vision_model

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
ONE = prompt_with([20, 30, 40], None, [50, 60])
TWO = prompt_with([25], None, [50, 60, 70, 80], None, [90, 100])
TEXT = prompt_with([*range(30, 60)])


RANK = """
import base64, json, os, sys
import torch
from pathlib import Path
from flambeau.llm.images.image_processor import ImageFile
from flambeau.llm.loader import load_engine, load_follower
from flambeau.llm.sampling_params import SamplingParams

torch.set_num_threads(1)
folder, size, (prompts, images, options) = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
options = {"tensor_parallel_size": size, "compile": False, "device": "cpu", **options}
if os.environ["RANK"] != "0":
    load_follower(folder, **options)()
else:
    engine = load_engine(folder, **options)
    files = [[ImageFile(data=base64.b64decode(data), name="") for data in own] for own in images]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for _ in range(2):  # then with prefixes from the cache
        found = engine.generate(prompts, params, media=[engine.encode_images(own) for own in files])
        print(json.dumps([[each.token_ids, each.counts.num_cached] for each in found]))
    engine.close()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("gemma")
    return folder, write_vision_model(folder)


@pytest.fixture(scope="module")
def engine(made) -> Engine:
    return Engine.from_pretrained(made[0], compile=False, device="cpu")


def encoded(engine: Engine, *seeds: int) -> list[EncodedMedia]:
    return engine.encode_images([ImageFile(data=jpeg(seed), name=f"image {seed}") for seed in seeds])


def reference_logits(reference: Any, engine: Engine, ids: list[int], seeds: tuple[int, ...]) -> Tensor:
    """The logits of transformers; the pixels are ours, which test_image_processor compares."""
    assert engine.images is not None
    pixels = [engine.images.processor.read(ImageFile(data=jpeg(seed), name="")).pixels() for seed in seeds]
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
    pixels = engine.images.processor.read(ImageFile(data=jpeg(3), name="")).pixels()
    with torch.inference_mode():
        expected = made[1].get_image_features(pixels.unsqueeze(0)).pooler_output[0]
    torch.testing.assert_close(image.features, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("prompt", "seeds"), [(TEXT, ()), (ONE, (1,)), (TWO, (1, 2)), (TWO, (3, 3))])
def test_tokens_are_those_of_transformers(made, engine, prompt, seeds):
    [found] = engine.generate([prompt], GREEDY, logprobs=1, media=[encoded(engine, *seeds)])
    check(made[1], engine, prompt, seeds, found)


def test_the_logits_of_a_whole_prompt_are_those_of_transformers(made, engine):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    engine.add("scored", TWO, params, scores_prompt=True, media=encoded(engine, 4, 5))
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
    found = engine.generate(prompts, GREEDY, media=[encoded(engine, *own) for own in seeds])
    for prompt, own, completion in zip(prompts, seeds, found, strict=True):
        check(made[1], engine, prompt, own, completion)


def test_two_images_never_share_blocks_and_the_same_image_does(made):
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", block_size=4)
    first, second = encoded(engine, 1), encoded(engine, 2)
    [before] = engine.generate([ONE], GREEDY, media=[first])
    [other] = engine.generate([ONE], GREEDY, media=[second])
    check(made[1], engine, ONE, (2,), other)
    assert other.counts is not None
    assert other.counts.num_cached == 4  # the block before the image alone
    [again] = engine.generate([ONE], GREEDY, media=[encoded(engine, 1)])
    assert again.token_ids == before.token_ids
    assert again.counts is not None
    assert again.counts.num_cached == (len(ONE) - 1) // 4 * 4


def test_an_image_whose_first_part_is_cached_is_computed_to_its_end(made):
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", block_size=8, max_step_tokens=8)
    engine.generate([ONE], GREEDY, media=[encoded(engine, 1)])
    longer = [*ONE[:-1], 77, 78, 79, 80]  # shares blocks up to the middle of the image at least
    [found] = engine.generate([longer], GREEDY, media=[encoded(engine, 1)])
    assert found.counts is not None
    assert found.counts.num_cached > 8
    check(made[1], engine, longer, (1,), found)


def test_a_preempted_request_reads_its_image_again(made):
    small = Engine.from_pretrained(made[0], compile=False, device="cpu", block_size=4, num_blocks=24)
    prompts, seeds = [ONE, [*TWO[: 3 + TOKENS + 2], 50], ONE], [(1,), (2,), (3,)]
    found = small.generate(prompts, GREEDY, media=[encoded(small, *own) for own in seeds])
    assert small.state.num_preempted > 0
    for prompt, own, completion in zip(prompts, seeds, found, strict=True):
        check(made[1], small, prompt, own, completion)


def test_prefixes_in_host_memory_are_those_of_text_alone(made):
    """Keys of stored blocks are digests of tokens, which say nothing of an image."""
    small = Engine.from_pretrained(
        made[0], compile=False, device="cpu", block_size=4, num_blocks=24, kv_host_memory_mb=16
    )
    try:
        for seeds in ((1,), (2,), (), (1,), (), (2,)):  # others evict the blocks of each
            prompt = ONE if seeds else TEXT
            [found] = small.generate([prompt], GREEDY, media=[encoded(small, *seeds)])
            check(made[1], small, prompt, seeds, found)
    finally:
        small.close()


@pytest.mark.parametrize(
    ("size", "options"), [(4, {}), (2, {"max_step_tokens": 18, "kv_host_memory_mb": 16, "num_blocks": 40})]
)
def test_ranks_read_images(made, engine, size, options):
    prompts, seeds = [ONE, TEXT, TWO], [(1,), (), (1, 2)]
    images = [encoded(engine, *own) for own in seeds]
    expected = [found.token_ids for found in engine.generate(prompts, GREEDY, media=images)]
    files = [[base64.b64encode(jpeg(seed)).decode() for seed in own] for own in seeds]
    lines = run_ranks(made[0], size, RANK, [prompts, files, {"block_size": 4, **options}])
    for line in lines:
        assert [tokens for tokens, _ in line] == expected
    assert all(num_cached > 0 for _, num_cached in lines[-1])


def test_several_choices_read_the_same_image(made, engine):
    found = engine.generate([ONE], GREEDY, n=3, media=[encoded(engine, 6)])
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids
    check(made[1], engine, ONE, (6,), found[0])


@pytest.mark.parametrize("kind", ["lookup", "draft"])
def test_speculation_changes_nothing(made, kind):
    """A draft reads the tokens in the place of an image as text, and what it proposes is verified."""
    options = {"draft": str(made[0])} if kind == "draft" else {}
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", speculation=kind, speculate_k=3, **options)
    [found] = engine.generate([TWO], GREEDY, media=[encoded(engine, 1, 2)])
    check(made[1], engine, TWO, (1, 2), found)


def test_the_kernels_of_the_cpu_read_images_too(made):
    engine = Engine.from_pretrained(made[0], device="cpu")
    try:
        engine.wait_until_compiled()
        found = engine.generate([TWO, TEXT], GREEDY, media=[encoded(engine, 1, 2), []])
        check(made[1], engine, TWO, (1, 2), found[0])
        check(made[1], engine, TEXT, (), found[1])
    finally:
        engine.close()


@pytest.mark.parametrize("prompt", [TEXT, ONE, [*ONE[:10], 50], prompt_with([IMAGE])])
def test_a_prompt_without_places_for_its_images_is_rejected(engine, prompt):
    images = [] if IMAGE in prompt else encoded(engine, 1)
    with pytest.raises(InvalidRequest, match="send images in the messages of a chat"):
        engine.generate([prompt], GREEDY, media=[images])


def test_the_decoder_alone_is_quantized(made, engine):
    quantized = Engine.from_pretrained(made[0], compile=False, device="cpu", quantization="int8")
    assert any(isinstance(layer, Int8Linear) for layer in quantized.model.modules())
    assert torch.equal(encoded(quantized, 1)[0].features, encoded(engine, 1)[0].features)
    [found] = quantized.generate([ONE], GREEDY, media=[encoded(quantized, 1)])
    assert len(found.token_ids) == 30


def test_adapters_and_images_go_together(made, tmp_path):
    """An adapter that is added to each step gives what one that is merged into the weights gives."""
    shapes = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in load_file(made[0] / "model.safetensors").items()
        if name.endswith(("language_model.model.layers.1.self_attn.q_proj.weight", "layers.2.mlp.down_proj.weight"))
    }
    write_adapter(tmp_path / "style", shapes, seed=3)
    options = {"compile": False, "device": "cpu", "lora_adapters": {"style": str(tmp_path / "style")}}
    merged = Engine.from_pretrained(made[0], merge_lora=True, **options)
    added = Engine.from_pretrained(made[0], **options)
    images = encoded(added, 1, 2)
    [plain] = added.generate([TWO], GREEDY, media=[images])
    [own] = added.generate([TWO], GREEDY, adapter="style", media=[images])
    check(made[1], added, TWO, (1, 2), plain)
    assert own.token_ids != plain.token_ids
    assert own.token_ids == merged.generate([TWO], GREEDY, media=[images])[0].token_ids


def test_an_adapter_of_the_encoder_is_rejected(made, tmp_path):
    write_adapter(tmp_path / "eyes", {"vision_tower.encoder.layers.0.self_attn.q_proj": (24, 24)}, seed=3)
    with pytest.raises(CheckpointError, match="cannot be changed here: vision_tower"):
        Engine.from_pretrained(made[0], compile=False, device="cpu", lora_adapters={"eyes": str(tmp_path / "eyes")})


# ---- the cache of embeddings ----


def test_images_are_encoded_once_by_what_their_files_hold(made, monkeypatch):
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu")
    assert engine.images is not None
    calls = []
    encode = engine.images._encode
    monkeypatch.setattr(engine.images, "_encode", lambda *given: calls.append(1) or encode(*given))
    first, second, third = encoded(engine, 1, 1, 2)
    assert first.features is second.features
    assert (first.digest == second.digest, first.digest == third.digest) == (True, False)
    assert encoded(engine, 2)[0].features is third.features
    assert len(calls) == 2


def test_the_cache_forgets_what_was_used_longest_ago():
    cache = FeatureCache(max_bytes=2 * 4 * 100)
    images = {name: EncodedMedia(name, torch.full((100,), float(name[0]))) for name in (b"1", b"2", b"3")}
    for name in (b"1", b"2"):
        cache.put(images[name])
    assert cache.get(b"1") is images[b"1"]
    cache.put(images[b"3"])
    assert (cache.get(b"2"), cache.num_bytes) == (None, 800)
    assert cache.get(b"1") is images[b"1"]
    cache.put(EncodedMedia(b"4", torch.zeros(1000)))  # larger than all
    assert (cache.get(b"4"), cache.num_bytes) == (None, 800)


def test_an_image_that_cannot_be_read_is_found_before_any_is_encoded(engine, monkeypatch):
    monkeypatch.setattr(engine.images, "_encode", lambda pixels: pytest.fail("it was encoded"))
    files = [ImageFile(data=jpeg(99), name="good"), ImageFile(data=b"no", name="bad")]
    with pytest.raises(InvalidRequest, match="bad is not an image"):
        engine.encode_images(files)


def test_nothing_is_encoded_for_a_cancelled_request(engine, monkeypatch):
    monkeypatch.setattr(engine.images, "_encode", lambda pixels: pytest.fail("it was encoded"))
    assert engine.encode_images([ImageFile(data=jpeg(98), name="")], lambda: True) == []
