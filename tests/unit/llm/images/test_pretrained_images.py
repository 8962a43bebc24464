"""Models whose images transformers encodes: prompts, embeddings and tokens are those of its whole model.

The decoder, the scheduler and the caches are the engine's own.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from flambeau.errors import InvalidField
from flambeau.handlers.generation.chat_images import ChatImages
from flambeau.handlers.generation.request_reader import RequestReader
from flambeau.llm.core.outputs import Completion
from flambeau.llm.core.sequence import EncodedMedia
from flambeau.llm.engine import Engine
from flambeau.llm.errors import CheckpointError, InvalidRequest, LLMError
from flambeau.llm.images.image_encoder import ImageEncoder
from flambeau.llm.images.image_files import ImageFile, not_encoded
from flambeau.llm.images.pretrained_encoder import by_layers, joined, load_pretrained_encoder, with_added
from flambeau.llm.images.pretrained_processor import PretrainedProcessor
from flambeau.llm.models.families.image_readers import IMAGE_READERS, TEXT_SIZES, ImageReader
from flambeau.llm.models.vision_architecture import PretrainedVision
from flambeau.llm.quantize.row_scaled import Int8Linear
from flambeau.llm.sampling_params import SamplingParams
from flambeau.wire.generation import Generate, MediaInput, encode_request
from support.adapters import write_adapter
from support.checkpoints import HAS_ALL_FAMILIES, is_older
from support.later_vision_models import LATER_KINDS
from support.more_vision_models import MORE_KINDS
from support.omni_models import OMNI_KINDS
from support.pictures import encode, jpeg, picture
from support.pretrained_vision_models import ID, KINDS, write_pretrained_vision_model
from support.ranks import run_ranks
from unit.llm.images.test_engine_images import RANK

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
ALL = {**KINDS, **MORE_KINDS, **LATER_KINDS, **OMNI_KINDS}
PART = {"type": "image"}
WIDE, TALL, SMALL = jpeg(1, 120, 40), jpeg(2, 50, 75), encode(picture(20, 20, 3), "PNG")
# Where transformers' class with images leaves out the scale of logits that its class of the decoder alone has.
LOGIT_SCALES = {"granite-vision": 0.25, "cohere-2-vision": 0.0625, "aya-vision": 0.0625}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


ONE = ([PART, text("What is this?")], (WIDE,))
THREE = ([text("a b\n"), PART, PART, text(" c"), PART], (TALL, SMALL, jpeg(4, 200, 260)))
NONE = ([text("Whether 'tis nobler in the mind")], ())


@dataclass(frozen=True)
class Made:
    """A model on disk, the network that it was written from, and an engine that has loaded it."""

    folder: Path
    reference: Any
    engine: Engine
    scale: float = 1.0

    def prompt(self, contents: Sequence[Any], files: Sequence[bytes], engine: Engine | None = None) -> list[int]:
        """The prompt of a chat, as a request through the chat API makes it."""
        return chat(reader_of(engine or self.engine), contents, files).prompts[0]

    def theirs(self, contents: Sequence[Any], files: Sequence[bytes]) -> Any:
        """The inputs of a chat that transformers makes."""
        import transformers

        processor = transformers.AutoProcessor.from_pretrained(self.folder)
        processor.image_processor = transformers.AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        opened = iter({"type": "image", "image": Image.open(io.BytesIO(data)).convert("RGB")} for data in files)
        messages = [{"role": "user", "content": [next(opened) if part is PART else part for part in contents]}]
        template = processor.tokenizer.chat_template
        if type(processor).__name__ == "GotOcr2Processor":  # images of chats are lists of pages for it
            [words] = [processor.apply_chat_template(messages, template, add_generation_prompt=True)]
            pages = [part["image"] for part in messages[0]["content"] if part["type"] == "image"]
            read = partial(processor, pages) if pages else processor.tokenizer
            return read(words, return_tensors="pt")
        return processor.apply_chat_template(
            messages, template, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )

    def logits(self, inputs: Any, ids: Sequence[int]) -> Tensor:
        """Those of transformers, for the tokens of a chat and further ones."""
        number = len(ids) - inputs["input_ids"].shape[1]
        given = {key: value.float() if value.is_floating_point() else value for key, value in inputs.items()}
        if "mm_token_type_ids" in given:
            given["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, number))
        every = torch.tensor([ids])
        given = {**given, "input_ids": every, "attention_mask": torch.ones_like(every)}
        if hasattr(self.reference, "create_masks_for_generate"):  # plain calls mask otherwise (Gemma 4 unified)
            embedded = torch.zeros(*every.shape, self.reference.config.text_config.hidden_size)
            options = {name: given.get(name) for name in ("attention_mask", "mm_token_type_ids")}
            given["attention_mask"] = self.reference.create_masks_for_generate(
                self.reference.config, embedded, past_key_values=None, position_ids=None, **options
            )
        with torch.inference_mode():
            found = self.reference(**given)
        return found.logits[0].float() * self.scale

    def features(self, inputs: Any, reader: ImageReader) -> Tensor:
        """The embeddings of all images of a chat, by transformers."""
        names = ("pixel_values", "batch_num_images", *reader.inputs)
        given = {name: inputs[name] for name in names if name in inputs}
        given["pixel_values"] = given["pixel_values"].float()
        with torch.inference_mode():
            encode = getattr(self.reference, "get_image_features", None) or self.reference.model.get_image_features
            found = encode(**given)
            if reader.names_layers:
                return by_layers(found.deepstack_features)
            if reader.adds_features:
                return with_added(found, self.engine.images.arch.scale)  # type: ignore[union-attr]
            if reader.projects:
                return joined(self.reference.multi_modal_projector(found.last_hidden_state))
        return joined(found.pooler_output) * self.engine.images.arch.scale  # type: ignore[union-attr]

    def check(self, contents: Sequence[Any], files: Sequence[bytes], ids: list[int], found: Completion) -> None:
        check(found, self.logits(self.theirs(contents, files), [*ids, *found.token_ids])[len(ids) - 1 : -1])


def check(found: Completion, logits: Tensor) -> None:
    """Every generated token is the one that transformers finds most likely, with the same log-probability."""
    assert found.token_ids == logits.argmax(-1).tolist()
    if found.tokens is not None:
        expected = logits.log_softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor([one.logprob for one in found.tokens]), expected, atol=1e-4, rtol=0)


def reader_of(engine: Engine) -> RequestReader:
    assert engine.images is not None
    return RequestReader(
        engine.tokenizer,
        max_length=2000,
        defaults=SamplingParams(),
        has_own_limit=False,
        streams=False,
        images=ChatImages.of(engine.images.arch, engine.images.processor, engine.tokenizer),
    )


def chat(reader: RequestReader, contents: Sequence[Any], files: Sequence[bytes]) -> Any:
    images = [
        MediaInput(f"image {i}", f"data:image/jpeg;base64,{base64.b64encode(data).decode()}")
        for i, data in enumerate(files)
    ]
    return reader.generate(
        encode_request(Generate(messages=[{"role": "user", "content": contents}], files=images)), None
    )


def encoded(engine: Engine, files: Sequence[bytes]) -> list[EncodedMedia]:
    return engine.encode_images([ImageFile(data=data, name="an image") for data in files])


def make(folder: Path, kind: str, **options: Any) -> Made:
    reference = write_pretrained_vision_model(folder, ALL[kind])
    engine = Engine.from_pretrained(folder, compile=False, device="cpu", **options)
    return Made(folder, reference, engine, LOGIT_SCALES.get(kind, 1.0))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return make(tmp_path_factory.mktemp("mistral"), "mistral-3")


def test_every_family_is_compared():
    assert {kind.class_name for kind in ALL.values()} == set(IMAGE_READERS)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # transformers' own inputs
@pytest.mark.parametrize("kind", ALL)
def test_chats_with_images_are_those_of_transformers(tmp_path, monkeypatch, kind):
    if IMAGE_READERS[ALL[kind].class_name].needs_timm:
        pytest.importorskip("timm")
    if kind == "smolvlm":  # its processor asks for a package that only videos need
        monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    model = make(tmp_path, kind, block_size=4, max_step_tokens=50)
    reader = IMAGE_READERS[ALL[kind].class_name]
    chats = [ONE, NONE, *([] if reader.reads_one else [THREE])]
    prompts = [model.prompt(*one) for one in chats]
    images = [encoded(model.engine, files) for _, files in chats]
    found = model.engine.generate(prompts, GREEDY, logprobs=1, media=images)
    for one, ids, own, completion in zip(chats, prompts, images, found, strict=True):
        inputs = model.theirs(*one)
        assert ids == inputs["input_ids"][0].tolist()
        if own:
            arch = model.engine.images.arch
            encoded_ids = torch.tensor([one for one in ids if one in arch.ids])  # the chat's tokens that images embed
            features = torch.cat([image.features for image in own])[encoded_ids == arch.image_id]
            torch.testing.assert_close(features, model.features(inputs, reader), atol=1e-4, rtol=0)
        logits = model.logits(inputs, [*ids, *completion.token_ids])[len(ids) - 1 : -1]
        check(completion, logits)


def test_the_logits_of_a_whole_prompt_are_those_of_transformers(made):
    ids, images = made.prompt(*THREE), encoded(made.engine, THREE[1])
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    made.engine.add("scored", ids, params, scores_prompt=True, media=images)
    infos = None
    while made.engine.has_work:
        for output in made.engine.step():
            infos = output.prompt_tokens or infos
    expected = made.logits(made.theirs(*THREE), ids).log_softmax(-1)
    wanted = [float(expected[i, token]) for i, token in enumerate(ids[1:])]
    assert infos is not None
    torch.testing.assert_close([info.logprob for info in infos], wanted, atol=1e-4, rtol=0)


def test_two_images_never_share_blocks_and_the_same_image_does(made):
    engine = Engine.from_pretrained(made.folder, compile=False, device="cpu", block_size=4, max_step_tokens=5)
    other = ([PART, text("What is this?")], (jpeg(7, 120, 40),))
    ids = made.prompt(*ONE)
    assert ids == made.prompt(*other)  # of the same size
    before, image = ids.index(ID["[IMG]"]), encoded(engine, ONE[1])
    [first] = engine.generate([ids], GREEDY, media=[image])
    [second] = engine.generate([ids], GREEDY, media=[encoded(engine, other[1])])
    made.check(*other, ids, second)
    assert second.counts is not None
    assert second.counts.num_cached == before // 4 * 4
    [again] = engine.generate([ids], GREEDY, media=[image])
    assert again.token_ids == first.token_ids
    assert again.counts is not None
    assert again.counts.num_cached == (len(ids) - 1) // 4 * 4


def test_preempted_requests_read_their_images_again(made):
    small = Engine.from_pretrained(made.folder, compile=False, device="cpu", block_size=4, num_blocks=32)
    chats = [ONE, ([PART, PART], (SMALL, TALL)), ONE]
    prompts = [made.prompt(*one) for one in chats]
    found = small.generate(prompts, GREEDY, media=[encoded(small, files) for _, files in chats])
    assert small.state.num_preempted > 0
    for one, ids, completion in zip(chats, prompts, found, strict=True):
        made.check(*one, ids, completion)


def test_two_ranks_read_images(made):
    chats = [ONE, NONE, THREE]
    prompts = [made.prompt(*one) for one in chats]
    files = [[base64.b64encode(data).decode() for data in own] for _, own in chats]
    for line in run_ranks(made.folder, 2, RANK, [prompts, files, {"block_size": 4}]):
        for one, ids, (tokens, _) in zip(chats, prompts, line, strict=True):
            made.check(*one, ids, Completion(token_ids=tokens))


def test_the_decoder_alone_is_quantized_and_adapted(made, tmp_path):
    quantized = Engine.from_pretrained(made.folder, compile=False, device="cpu", quantization="int8")
    assert any(isinstance(layer, Int8Linear) for layer in quantized.model.modules())
    assert torch.equal(encoded(quantized, ONE[1])[0].features, encoded(made.engine, ONE[1])[0].features)
    tensors = load_file(made.folder / "model.safetensors")
    shapes = {
        name.removesuffix(".weight"): tuple(tensors[name].shape)
        for name in ("language_model.model.layers.1.self_attn.q_proj.weight",)
    }
    write_adapter(tmp_path / "adapter", shapes)
    ids, images = made.prompt(*ONE), [encoded(made.engine, ONE[1])]
    made.engine.load_adapter("own", tmp_path / "adapter")
    merged = Engine.from_pretrained(
        made.folder, compile=False, device="cpu", lora_adapters={"own": str(tmp_path / "adapter")}, merge_lora=True
    )
    [expected] = merged.generate([ids], GREEDY, adapter="own", media=images)
    [found, plain] = [made.engine.generate([ids], GREEDY, adapter=name, media=images)[0] for name in ("own", "")]
    assert found.token_ids == expected.token_ids != plain.token_ids
    made.check(*ONE, ids, plain)


NAMES = {
    "first": ((r"^vision_tower\.", "vision_tower.vision_model."),),
    "newest": (
        (r"^language_model\.lm_head", "lm_head"),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
    ),
}


def test_files_of_old_and_new_versions_have_other_names(tmp_path):
    (tmp_path / "llava").mkdir()
    model = make(tmp_path / "llava", "llava")
    ids, images = model.prompt(*ONE), encoded(model.engine, ONE[1])
    [expected] = model.engine.generate([ids], GREEDY, media=[images])
    tensors = load_file(model.folder / "model.safetensors")
    for version, names in NAMES.items():
        folder = tmp_path / version
        folder.mkdir()
        copy(model.folder, folder)
        changed = {reduce(lambda n, one: re.sub(*one, n), names, name): tensor for name, tensor in tensors.items()}
        assert changed.keys() != tensors.keys()
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        engine = Engine.from_pretrained(folder, compile=False, device="cpu")
        found = encoded(engine, ONE[1])
        assert torch.equal(found[0].features, images[0].features)
        assert engine.generate([ids], GREEDY, media=[found])[0].token_ids == expected.token_ids


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "bitsandbytes", "fp8"])
def test_the_encoder_beside_a_quantized_decoder_is_read_as_it_is(made, tmp_path, method):
    model = copy(made.folder, tmp_path, "config.json", quantization_config={"quant_method": method, "bits": 4})
    assert made.engine.images is not None
    arch = made.engine.images.arch
    assert isinstance(arch, PretrainedVision)
    network = load_pretrained_encoder(model, arch, "^vision", device=torch.device("cpu"), dtype=torch.float32)
    found = ImageEncoder(network, made.engine.images.processor, cache_bytes=0)
    file = ImageFile(data=WIDE, name="")
    assert torch.equal(found.encode([file])[0].features, made.engine.encode_images([file])[0].features)


def test_an_encoder_that_is_quantized_itself_is_refused(made, tmp_path, caplog):
    model = copy(made.folder, tmp_path)
    tensors = load_file(model / "model.safetensors")
    name = "vision_tower.transformer.layers.0.attention.q_proj.weight"
    save_file({**tensors, name + "_more": torch.ones(2)}, model / "model.safetensors", {"format": "pt"})
    Engine.from_pretrained(model, compile=False, device="cpu")
    assert f"does not use: {name}_more" in caplog.text
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"quantized, which is not supported: {name}.* read_images: false"):
        Engine.from_pretrained(model, compile=False, device="cpu")


def test_names_of_tokens_in_a_text_are_no_images(made):
    ids = made.prompt([text("[IMG] [IMG_END]"), PART], ONE[1])
    assert ids.count(ID["[IMG_END]"]) == 1


def test_a_marker_that_is_no_token_is_none_in_a_text_either(tmp_path):
    model = make(tmp_path, "aya-vision")
    tokenizer = model.engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode_chat([{"role": "user", "content": [text("MARK it "), PART]}], expansions={"MARK": []})
    assert "MARK it" in tokenizer.decode(ids)


def test_a_second_image_is_refused_where_it_would_be_encoded_otherwise(tmp_path):
    model = make(tmp_path, "llava-onevision")
    with pytest.raises(InvalidField, match=r"image 1 is a second image, .* send one image"):
        model.prompt([PART, PART], (SMALL, TALL))
    ids = model.prompt([PART], (SMALL,))
    with pytest.raises(InvalidRequest, match="send one image"):
        model.engine.generate([[*ids, *ids]], media=[encoded(model.engine, (SMALL, SMALL))])


def test_a_processor_that_writes_something_else_for_a_second_image_is_refused(made, monkeypatch):
    assert made.engine.images is not None
    processor = made.engine.images.processor
    assert isinstance(processor, PretrainedProcessor)
    processor.try_out()
    texts = processor._texts
    monkeypatch.setattr(processor, "_texts", lambda images: [*texts(images[:1]), *["[IMG]"] * (len(images) - 1)])
    with pytest.raises(ValueError, match="for two images, and"):
        processor.try_out()


@pytest.mark.parametrize("places", [0, 9, 11])
def test_a_prompt_without_places_for_its_images_is_rejected(made, places):
    with pytest.raises(InvalidRequest, match="send images in the messages of a chat"):
        made.engine.generate([[5] + [ID["[IMG]"]] * places + [60]], media=[encoded(made.engine, ONE[1])])


@pytest.mark.parametrize("size", [(1, 1), (600, 3), (12, 12), (600, 4)])  # the third is refused by the encoder
def test_an_image_that_transformers_cannot_read_is_named(made, size):
    expected = f"an image is an image of {size[0]} x {size[1]} pixels, which is too small or too narrow for this model"
    with pytest.raises(InvalidRequest, match=expected):
        encoded(made.engine, (encode(picture(*size, 1), "PNG"),))


def test_why_a_large_image_cannot_be_encoded_is_said():
    file = ImageFile(data=WIDE, name="images[0]")
    assert "too small" in str(not_encoded(file, RuntimeError("sizes")))
    file = ImageFile(data=jpeg(1, 300, 200), name="images[0]")
    assert "300 x 200 pixels, which the model cannot encode: sizes" in str(not_encoded(file, RuntimeError("sizes")))


def test_settings_that_do_not_belong_together_are_found_before_images_are_mixed_up(made, tmp_path):
    model = copy(made.folder, tmp_path, "processor_config.json", spatial_merge_size=1)
    with pytest.raises(LLMError, match="tokens by its processor"):
        encoded(Engine.from_pretrained(model, compile=False, device="cpu"), ONE[1])


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("processor_config.json", {"processor_class": "FuyuProcessor"}, "FuyuProcessor; supported is PixtralProcessor"),
        ("processor_config.json", {"image_token": "[NONE]"}, r"writes no \[IMG\]"),
        ("preprocessor_config.json", {"image_processor_type": "NoSuchProcessor"}, "transformers cannot read images"),
        ("config.json", {"vision_config": {"model_type": "pixtral"}}, "has no weights that fit"),
    ],
)
def test_what_cannot_be_read_is_rejected_by_name(made, tmp_path, name, changes, reason):
    model = copy(made.folder, tmp_path, name, **changes)
    with pytest.raises(CheckpointError, match=reason):
        Engine.from_pretrained(model, compile=False, device="cpu")


def test_the_encoder_can_be_left_out(made, tmp_path):
    model = copy(made.folder, tmp_path, "processor_config.json", processor_class="FuyuProcessor")
    assert Engine.from_pretrained(model, compile=False, device="cpu", read_images=False).images is None


def test_keys_that_transformers_does_not_know_are_named(made, tmp_path, caplog):
    vision = json.loads((made.folder / "config.json").read_text())["vision_config"]
    model = copy(made.folder, tmp_path, "config.json", vision_config={**vision, "window_of_ours": 3})
    Engine.from_pretrained(model, compile=False, device="cpu")
    assert "no effect: window_of_ours" in caplog.text


def test_without_transformers_it_is_a_model_of_text_and_says_so(made, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "transformers", None)
    engine = Engine.from_pretrained(made.folder, compile=False, device="cpu")
    assert "the model reads text only" in caplog.text
    assert "transformers" in caplog.text
    ids = made.prompt(*NONE)
    [found] = engine.generate([ids], GREEDY)
    assert found.token_ids == made.engine.generate([ids], GREEDY)[0].token_ids
    with pytest.raises(InvalidRequest, match="reads no images"):
        encoded(engine, ONE[1])


WITHOUT_TORCHVISION = """
import importlib.util, sys
from pathlib import Path
from flambeau.llm.engine import Engine
from flambeau.llm.images.image_files import ImageFile

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torchvision" else found(name, package)
sys.modules["torchvision"] = None
engine = Engine.from_pretrained(sys.argv[1], compile=False, device="cpu")
[image] = engine.encode_images([ImageFile(data=Path(sys.argv[2]).read_bytes(), name="")])
print(image.features.sum().item())
"""


def test_torchvision_is_not_needed(made, tmp_path):
    (tmp_path / "image").write_bytes(TALL)
    command = [sys.executable, "-c", WITHOUT_TORCHVISION, str(made.folder), str(tmp_path / "image")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) == pytest.approx(encoded(made.engine, (TALL,))[0].features.sum().item(), abs=1e-3)


def test_torchvision_is_named_where_it_is_needed(tmp_path, monkeypatch, caplog):
    write_pretrained_vision_model(tmp_path, KINDS["llama-4"])
    found = importlib.util.find_spec
    absent = lambda name, package=None: None if name == "torchvision" else found(name, package)  # noqa: E731
    monkeypatch.setattr("flambeau.llm.images.pretrained_processor.importlib.util.find_spec", absent)
    assert Engine.from_pretrained(tmp_path, compile=False, device="cpu").images is None
    assert "pip install torchvision" in caplog.text


def test_weights_without_an_encoder_are_a_model_of_text(made, tmp_path, caplog):
    model = copy(made.folder, tmp_path)
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith("language_model.")}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    engine = Engine.from_pretrained(model, compile=False, device="cpu")
    assert engine.images is None
    assert "holds no weights of an encoder" in caplog.text


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("template", ["{{ bos_token }}", ""])
def test_chats_begin_with_the_first_token_once_as_those_of_processors(tmp_path, template):
    """Tokenizers of transformers leave it to templates; its processors, which have LLaVA's chats, do not."""
    write_pretrained_vision_model(tmp_path, KINDS["llava"])
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [ID["<bos>"]], "tokens": ["<bos>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = settings["chat_template"].replace("{{ bos_token }}", template)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = Made(tmp_path, None, Engine.from_pretrained(tmp_path, compile=False, device="cpu"))
    for chat in (ONE, NONE, THREE, ([text("<bos> and"), PART], (SMALL,))):
        ids = model.prompt(*chat)
        assert ids[0] == ID["<bos>"] != ids[1]
        if chat[0][0] != text("<bos> and"):  # which stays a text here
            assert ids == model.theirs(*chat)["input_ids"][0].tolist()


@pytest.mark.parametrize("kind", sorted(ALL))
def test_encoders_run_in_bfloat16(tmp_path, monkeypatch, kind):
    if IMAGE_READERS[ALL[kind].class_name].needs_timm:
        pytest.importorskip("timm")
    if kind == "smolvlm":  # its processor asks for a package that only videos need
        monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    write_pretrained_vision_model(tmp_path, ALL[kind])
    engine = Engine.from_pretrained(tmp_path, compile=False, device="cpu", dtype="bfloat16")
    [found] = encoded(engine, (jpeg(4, 200, 260),))
    assert found.features.dtype == torch.bfloat16
    assert found.features.isfinite().all()


def test_older_names_of_keys_are_known(tmp_path):
    model = make(tmp_path, "nemotron-h-omni")
    ids, images = model.prompt(*ONE), encoded(model.engine, ONE[1])
    config = json.loads((tmp_path / "config.json").read_text())
    older = {"llm_config": config.pop("text_config"), "img_context_token_id": config.pop("image_token_id")}
    (tmp_path / "config.json").write_text(json.dumps({**config, **older}))
    engine = Engine.from_pretrained(tmp_path, compile=False, device="cpu")
    assert torch.equal(encoded(engine, ONE[1])[0].features, images[0].features)
    [found] = engine.generate([ids], GREEDY, logprobs=1, media=[images])
    model.check(*ONE, ids, found)


def test_an_older_transformers_without_the_class_is_named(made, monkeypatch, caplog):
    import transformers

    monkeypatch.setattr(type(transformers), "__getattr__", without(transformers, "Mistral3Model"))
    engine = Engine.from_pretrained(made.folder, compile=False, device="cpu")
    assert engine.images is None
    assert "Mistral3Model needs 5.22 or later" in caplog.text


def test_a_processor_that_was_compared_with_a_newer_transformers_is_not_used(tmp_path, monkeypatch, caplog):
    write_pretrained_vision_model(tmp_path, OMNI_KINDS["qwen-2.5-omni"])
    monkeypatch.setattr("transformers.__version__", "5.22.2")
    engine = Engine.from_pretrained(tmp_path, compile=False, device="cpu")
    assert engine.images is None
    assert engine.sounds is None
    assert caplog.text.count("is 5.22.2, and Qwen2_5OmniThinkerForConditionalGeneration needs 5.23 or later") == 2


def without(module: Any, name: str) -> Any:
    """What finds attributes of a module, but one."""
    vars(module).pop(name, None)
    find = type(module).__getattr__

    def found(self: Any, asked: str) -> Any:
        if asked == name:
            raise AttributeError(asked)
        return find(self, asked)

    return found


def test_sizes_that_files_leave_out_are_those_of_transformers():
    import transformers

    for name, sizes in TEXT_SIZES.items():
        if name not in transformers.CONFIG_MAPPING and is_older(transformers.__version__, HAS_ALL_FAMILIES):
            continue
        config = transformers.AutoConfig.for_model(name)
        assert {key: getattr(config, key) for key in sizes} == sizes


def copy(folder: Path, target: Path, name: str = "", **changes: Any) -> Path:
    """A copy of a model with other settings; None removes one."""
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    if name:
        given = {**json.loads((folder / name).read_text()), **changes}
        (target / name).write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    return target
