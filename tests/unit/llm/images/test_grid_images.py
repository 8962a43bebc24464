"""An engine with a Qwen-VL reads images of any size as transformers does: in turns, in chunks, from cached prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flambeau.llm.core.outputs import Completion
from flambeau.llm.core.sequence import EncodedMedia
from flambeau.llm.engine import Engine
from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.sampling_params import SamplingParams
from support.adapters import write_adapter
from support.grid_vision_models import BEGIN, END, IMAGE, KINDS, grid_prompt, write_grid_model
from support.pictures import jpeg

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
# Seeds, widths and heights of images.
WIDE, TALL, SMALL, OTHER = (1, 120, 40), (2, 50, 75), (3, 20, 20), (4, 120, 40)
TEXT = [*range(30, 60)]


RECURRENT = ("qwen_3.5", "qwen_3.5_moe")
ATTENDING = tuple(kind for kind in KINDS if kind not in RECURRENT)


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("qwen")
    return folder, write_grid_model(folder, request.param)


@pytest.fixture(scope="module")
def engine(made) -> Engine:
    return Engine.from_pretrained(made[0], compile=False, device="cpu")


def file(image: tuple[int, int, int]) -> ImageFile:
    return ImageFile(data=jpeg(*image), name=f"image {image[0]}")


def encoded(engine: Engine, *images: tuple[int, int, int]) -> list[EncodedMedia]:
    return engine.encode_images([*map(file, images)])


def prompt_of(engine: Engine, *parts: list[int] | tuple[int, int, int]) -> tuple[list[int], list[EncodedMedia]]:
    """Ids and images; a tuple is an image."""
    images = [*encoded(engine, *(part for part in parts if isinstance(part, tuple)))]
    sizes = iter(len(image.features) for image in images)
    return grid_prompt(*(next(sizes) if isinstance(part, tuple) else part for part in parts)), images


def reference_logits(reference: Any, engine: Engine, ids: list[int], images: tuple[Any, ...]) -> Tensor:
    """The logits of transformers; the pixels are ours, which test_grid_processor compares."""
    assert engine.images is not None
    read = [engine.images.processor.read(file(image)) for image in images]
    given = {}
    if read:
        grids = torch.tensor([(1, *one.grid) for one in read])
        given = {"pixel_values": torch.cat([one.pixels() for one in read]), "image_grid_thw": grids}
    reference.model.rope_deltas = None
    types = torch.tensor([[int(token == IMAGE) for token in ids]])
    with torch.inference_mode():
        return reference(torch.tensor([ids]), mm_token_type_ids=types, **given).logits[0].float()


def check(reference: Any, engine: Engine, prompt: list[int], images: tuple[Any, ...], found: Completion) -> None:
    """Every generated token is the one that transformers finds most likely, with the same log-probability."""
    expected = reference_logits(reference, engine, [*prompt, *found.token_ids], images)[len(prompt) - 1 : -1]
    assert len(found.token_ids) == 30
    assert found.token_ids == expected.argmax(-1).tolist()
    if found.tokens is not None:
        logprobs = expected.log_softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor([one.logprob for one in found.tokens]), logprobs, atol=1e-4, rtol=0)


CHATS = {
    "text": (TEXT,),
    "one": ([20, 30, 40], WIDE, [50, 60]),
    "first": (TALL, [50]),
    "two sizes": ([25], WIDE, [50, 60, 70, 80], TALL, [90, 100]),
    "side by side": ([25], SMALL, TALL, SMALL, [90, 100]),
    "a text after": ([20, 30], TALL, [*range(100, 200)]),
}


@pytest.mark.parametrize("image", [WIDE, TALL, SMALL, (5, 33, 90), (6, 400, 380)])
def test_embeddings_are_those_of_transformers(made, engine, image):
    resized = engine.images.processor.read(file(image))
    with torch.inference_mode():
        expected = made[1].model.get_image_features(resized.pixels(), torch.tensor([(1, *resized.grid)]))
    deep = getattr(expected, "deepstack_features", None) or ()
    wanted = torch.cat([expected.pooler_output[0], *(layer[0] for layer in deep)], dim=-1)
    [found] = encoded(engine, image)
    assert found.grid == tuple(side // 2 for side in resized.grid)
    torch.testing.assert_close(found.features, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CHATS)
def test_tokens_are_those_of_transformers(made, engine, name):
    prompt, images = prompt_of(engine, *CHATS[name])
    [found] = engine.generate([prompt], GREEDY, logprobs=1, media=[images])
    check(made[1], engine, prompt, tuple(part for part in CHATS[name] if isinstance(part, tuple)), found)


def test_generate_of_transformers_gives_the_same_text(made, engine):
    """Its own positions of generated tokens, from the cache."""
    prompt, images = prompt_of(engine, *CHATS["two sizes"])
    [found] = engine.generate([prompt], GREEDY, media=[images])
    read = [engine.images.processor.read(file(image)) for image in (WIDE, TALL)]
    made[1].model.rope_deltas = None
    ids = made[1].generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        mm_token_type_ids=torch.tensor([[int(token == IMAGE) for token in prompt]]),
        pixel_values=torch.cat([one.pixels() for one in read]),
        image_grid_thw=torch.tensor([(1, *one.grid) for one in read]),
        max_new_tokens=30,
        min_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert found.token_ids == ids[0, len(prompt) :].tolist()


def test_the_logits_of_a_whole_prompt_are_those_of_transformers(made, engine):
    prompt, images = prompt_of(engine, *CHATS["two sizes"])
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    engine.add("scored", prompt, params, scores_prompt=True, media=images)
    infos = None
    while engine.has_work:
        for output in engine.step():
            infos = output.prompt_tokens or infos
    expected = reference_logits(made[1], engine, prompt, (WIDE, TALL)).log_softmax(-1)
    wanted = [float(expected[i, token]) for i, token in enumerate(prompt[1:])]
    assert infos is not None
    torch.testing.assert_close([info.logprob for info in infos], wanted, atol=1e-4, rtol=2e-5)


@pytest.mark.parametrize("step_tokens", [5, 18, 64])
def test_requests_with_and_without_images_run_together_in_chunks(made, step_tokens):
    """Chunks end within images, too."""
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", max_step_tokens=step_tokens, block_size=4)
    names = ["one", "text", "two sizes", "a text after", "text", "side by side"]
    prompts, images = zip(*(prompt_of(engine, *CHATS[name]) for name in names), strict=True)
    found = engine.generate(prompts, GREEDY, media=images)
    for name, prompt, completion in zip(names, prompts, found, strict=True):
        check(made[1], engine, prompt, tuple(part for part in CHATS[name] if isinstance(part, tuple)), completion)


@pytest.mark.parametrize("made", ATTENDING, indirect=True)  # states of such short prompts are not kept
def test_an_image_in_the_second_turn(made):
    """It changes the positions of what comes before, whose blocks are then not shared."""
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", block_size=4)
    first = ([20, 30, 40, 50, 60, 70, 80, 90], WIDE, [50, 60])
    prompt, images = prompt_of(engine, *first)
    [answer] = engine.generate([prompt], GREEDY, media=[images])
    check(made[1], engine, prompt, (WIDE,), answer)
    [again] = engine.generate([prompt], GREEDY, media=[images])
    check(made[1], engine, prompt, (WIDE,), again)
    assert again.counts.num_cached == (len(prompt) - 1) // 4 * 4
    longer, images = prompt_of(engine, *first, answer.token_ids, [60, 61])
    [text] = engine.generate([longer], GREEDY, media=[images])
    assert text.counts.num_cached >= len(prompt)
    check(made[1], engine, longer, (WIDE,), text)
    longer, images = prompt_of(engine, *first, answer.token_ids, TALL, [60, 61])
    [second] = engine.generate([longer], GREEDY, media=[images])
    assert second.counts.num_cached == 0
    check(made[1], engine, longer, (WIDE, TALL), second)
    [third] = engine.generate([longer], GREEDY, media=[images])
    assert third.counts.num_cached == (len(longer) - 1) // 4 * 4
    check(made[1], engine, longer, (WIDE, TALL), third)


@pytest.mark.parametrize("made", RECURRENT, indirect=True)
def test_states_of_recurrent_layers_are_kept_behind_images(made):
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", block_size=4, max_step_tokens=100)
    chats = {"image": ([*range(20, 320)], WIDE, [50, 60]), "other": ([*range(20, 320)], TALL, [50, 60])}
    for name, cached in (("image", 0), ("image", 376), ("other", 0), ("image", 376), ("other", 356)):
        prompt, images = prompt_of(engine, *chats[name])
        [found] = engine.generate([prompt], GREEDY, media=[images])
        check(made[1], engine, prompt, (chats[name][1],), found)
        assert found.counts.num_cached == cached
    prompt, images = prompt_of(engine, *chats["image"], [*range(100, 140)])
    [text] = engine.generate([prompt], GREEDY, media=[images])
    check(made[1], engine, prompt, (WIDE,), text)
    assert text.counts.num_cached == 376
    prompt, images = prompt_of(engine, *chats["image"], TALL, [60])
    [second] = engine.generate([prompt], GREEDY, media=[images])
    check(made[1], engine, prompt, (WIDE, TALL), second)
    assert second.counts.num_cached == 0


def test_images_of_the_same_size_share_the_blocks_before_them_only(made):
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", block_size=4)
    before = [20, 30, 40, 50, 60, 70, 80, 90]
    for image, cached in ((WIDE, 0), (OTHER, 8), (TALL, 0)):
        prompt, images = prompt_of(engine, before, image, [50, 60])
        [found] = engine.generate([prompt], GREEDY, media=[images])
        check(made[1], engine, prompt, (image,), found)
        assert found.counts.num_cached == (cached if engine.arch.recurrence is None else 0)
    [text] = engine.generate([[*before, 50]], GREEDY)
    assert text.counts.num_cached == 0
    check(made[1], engine, [*before, 50], (), text)


def test_a_preempted_request_reads_its_image_again(made):
    small = Engine.from_pretrained(made[0], compile=False, device="cpu", block_size=4, num_blocks=40)
    chats = [([20, 30], WIDE, [50]), ([20], SMALL, [60, 70]), ([20, 30], TALL, [50])]
    prompts, images = zip(*(prompt_of(small, *chat) for chat in chats), strict=True)
    found = small.generate(prompts, GREEDY, media=images)
    assert small.state.num_preempted > 0
    for chat, prompt, completion in zip(chats, prompts, found, strict=True):
        check(made[1], small, prompt, (chat[1],), completion)


@pytest.mark.parametrize("made", ATTENDING, indirect=True)  # states are not kept there
def test_prefixes_in_host_memory_are_those_of_text_alone(made, engine):
    small = Engine.from_pretrained(
        made[0], compile=False, device="cpu", block_size=4, num_blocks=32, kv_host_memory_mb=16
    )
    try:
        for image in (WIDE, OTHER, None, WIDE, None, OTHER):  # others evict the blocks of each
            prompt, images = prompt_of(small, [20, 30, 40, 50, 60], *([image] if image else []), TEXT[:9])
            [found] = small.generate([prompt], GREEDY, media=[images])
            check(made[1], small, prompt, (image,) if image else (), found)
    finally:
        small.close()


def test_several_choices_read_the_same_image(made, engine):
    prompt, images = prompt_of(engine, *CHATS["one"])
    found = engine.generate([prompt], GREEDY, n=3, media=[images])
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids
    check(made[1], engine, prompt, (WIDE,), found[0])


@pytest.mark.parametrize("kind", ["lookup", "draft"])
def test_speculation_changes_nothing(made, kind):
    options = {"draft": str(made[0])} if kind == "draft" else {}
    engine = Engine.from_pretrained(made[0], compile=False, device="cpu", speculation=kind, speculate_k=3, **options)
    prompt, images = prompt_of(engine, *CHATS["two sizes"])
    [found] = engine.generate([prompt], GREEDY, media=[images])
    check(made[1], engine, prompt, (WIDE, TALL), found)


def test_the_kernels_of_the_cpu_decode_behind_images(made):
    """They also compute the chunks of prompts behind the last image; steps with images are plain PyTorch."""
    engine = Engine.from_pretrained(made[0], device="cpu", max_step_tokens=32)
    try:
        engine.wait_until_compiled()
        names = ["two sizes", "text", "a text after"]
        prompts, images = zip(*(prompt_of(engine, *CHATS[name]) for name in names), strict=True)
        found = engine.generate(prompts, GREEDY, media=images)
        assert engine.info.decode == "CPU kernels"
        for name, prompt, completion in zip(names, prompts, found, strict=True):
            check(made[1], engine, prompt, tuple(part for part in CHATS[name] if isinstance(part, tuple)), completion)
    finally:
        engine.close()


def test_a_prompt_without_places_for_its_images_is_rejected(engine):
    images = encoded(engine, WIDE)
    number = len(images[0].features)
    for prompt in (TEXT, grid_prompt([20], number - 1, [30]), [BEGIN, *[IMAGE] * number], grid_prompt(number, number)):
        with pytest.raises(InvalidRequest, match="send images in the messages of a chat"):
            engine.generate([prompt], GREEDY, media=[images])
    with pytest.raises(InvalidRequest, match="5 tokens in the places of images, and the images need 0"):
        engine.generate([[*grid_prompt(5), END]], GREEDY)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_decoder_alone_is_quantized(made, engine, quantization):
    quantized = Engine.from_pretrained(made[0], compile=False, device="cpu", quantization=quantization)
    assert torch.equal(encoded(quantized, WIDE)[0].features, encoded(engine, WIDE)[0].features)
    prompt, images = prompt_of(quantized, *CHATS["one"])
    [found] = quantized.generate([prompt], GREEDY, media=[images])
    assert len(found.token_ids) == 30


def test_adapters_and_images_go_together(made, tmp_path):
    """An adapter that is added to each step gives what one that is merged into the weights gives."""
    shapes = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in load_file(made[0] / "model.safetensors").items()
        if name.endswith(("layers.1.self_attn.q_proj.weight", "layers.1.self_attn.o_proj.weight"))
    }
    assert len(shapes) == 2
    write_adapter(tmp_path / "style", shapes, seed=3)
    options = {"compile": False, "device": "cpu", "lora_adapters": {"style": str(tmp_path / "style")}}
    merged = Engine.from_pretrained(made[0], merge_lora=True, **options)
    added = Engine.from_pretrained(made[0], **options)
    prompt, images = prompt_of(added, *CHATS["two sizes"])
    [plain] = added.generate([prompt], GREEDY, media=[images])
    [own] = added.generate([prompt], GREEDY, adapter="style", media=[images])
    check(made[1], added, prompt, (WIDE, TALL), plain)
    assert own.token_ids != plain.token_ids
    assert own.token_ids == merged.generate([prompt], GREEDY, media=[images])[0].token_ids


@pytest.mark.parametrize("prefix", ["visual", "model.visual"])
def test_an_adapter_of_the_encoder_is_rejected(made, tmp_path, prefix):
    write_adapter(tmp_path / "eyes", {f"{prefix}.blocks.0.attn.qkv": (72, 24)}, seed=3)
    with pytest.raises(CheckpointError, match=r"cannot be changed here: .*visual"):
        Engine.from_pretrained(made[0], compile=False, device="cpu", lora_adapters={"eyes": str(tmp_path / "eyes")})
