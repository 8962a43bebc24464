"""Models whose sounds transformers encodes: prompts, embeddings and tokens are those of its whole model.

The decoder, the scheduler and the caches are the engine's own.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flambeau.errors import InvalidField
from flambeau.handlers.generation.chat_images import ChatImages
from flambeau.handlers.generation.chat_sounds import ChatSounds
from flambeau.handlers.generation.request_reader import Prompted, RequestReader
from flambeau.llm.checkpoints.quantized import check_weights
from flambeau.llm.core.outputs import Completion
from flambeau.llm.core.sequence import EncodedMedia
from flambeau.llm.engine import Engine
from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.models.families.sound_readers import REFUSED, SOUND_READERS
from flambeau.llm.models.families.table import family_of
from flambeau.llm.quantize.row_scaled import Int8Linear
from flambeau.llm.sampling_params import SamplingParams
from flambeau.wire.generation import Generate, MediaInput, encode_request
from support.adapters import write_adapter
from support.pretrained_vision_models import ID
from support.ranks import run_ranks
from support.sound_models import RATE, SOUND_KINDS, VOXTRAL, samples_of, wav, write_sound_model, write_voxtral
from unit.llm.images.test_pretrained_images import GREEDY, check, copy, text

PART = {"type": "audio"}
LONG, SHORT = wav(samples_of(1, 1.7)), wav(samples_of(2, 0.43))


ONE = ([PART, text("What is this?")], (LONG,))
TWO = ([text("a b\n"), PART, PART, text(" c")], (SHORT, LONG))
TWO_LONG = ([text("a b\n"), PART, PART, text(" c")], (wav(samples_of(2, 1.2)), LONG))
# Where transformers fills a sound of less than a second up if there is a longer one beside it; here each is alone.
FILLED_UP = ("qwen-3-omni",)
NONE = ([text("Whether 'tis nobler in the mind")], ())


@dataclass(frozen=True)
class Made:
    """A model on disk, the network that it was written from, and an engine that has loaded it."""

    folder: Path
    reference: Any
    engine: Engine

    def chat(self, contents: Sequence[Any], files: Sequence[bytes]) -> Prompted:
        """A chat, as a request through the API makes it."""
        sounds = [
            MediaInput(f"sound {i}", f"data:audio/wav;base64,{base64.b64encode(data).decode()}", kind="sound")
            for i, data in enumerate(files)
        ]
        request = Generate(messages=[{"role": "user", "content": contents}], files=sounds)
        return reader_of(self.engine).generate(encode_request(request), None)

    def prompt(self, contents: Sequence[Any], files: Sequence[bytes]) -> tuple[list[int], list[EncodedMedia]]:
        found = self.chat(contents, files)
        return found.prompts[0], self.engine.encode_sounds(found.files.sounds)

    def theirs(self, contents: Sequence[Any], files: Sequence[bytes]) -> Any:
        """The inputs of a chat that transformers makes."""
        processor = transformers_processor(self.folder)
        messages = [{"role": "user", "content": contents}]
        words = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        options = {"add_special_tokens": False, "return_tensors": "pt"}
        if not files:
            return processor.tokenizer(words, **options)
        audio = [samples_in(data) for data in files]
        return processor(text=[words], audio=audio, sampling_rate=RATE, **options)

    def logits(self, inputs: Any, ids: Sequence[int], **more: Tensor) -> Tensor:
        """Those of transformers, for the tokens of a chat and further ones."""
        every = torch.tensor([ids])
        given = {key: value.float() if value.is_floating_point() else value for key, value in inputs.items()}
        for key in ("mm_token_type_ids", "token_type_ids"):
            given.pop(key, None)
        given |= {"input_ids": every, "attention_mask": torch.ones_like(every), **more}
        with torch.inference_mode():
            return self.reference(**given).logits[0].float()

    def embedded(self, inputs: Any, ids: Sequence[int]) -> Tensor:
        """What transformers puts into the places of sounds: what its decoder gets there."""
        assert self.engine.sounds is not None
        kept: list[Tensor] = []
        decoder = self.reference.model.language_model
        hook = decoder.register_forward_pre_hook(
            lambda module, args, options: kept.append(options["inputs_embeds"]), with_kwargs=True
        )
        self.logits(inputs, ids)
        hook.remove()
        return kept[0][0, [token in self.engine.sounds.arch.ids for token in ids]]

    def check(self, contents: Sequence[Any], files: Sequence[bytes], ids: list[int], found: Completion) -> None:
        check(found, self.logits(self.theirs(contents, files), [*ids, *found.token_ids])[len(ids) - 1 : -1])


def transformers_processor(folder: Path) -> Any:
    import transformers

    return transformers.AutoProcessor.from_pretrained(folder)


def samples_in(data: bytes) -> Any:
    return np.frombuffer(data[44:], "<i2").astype(np.float32) / 32768


def reader_of(engine: Engine) -> RequestReader:
    images, sounds = engine.images, engine.sounds
    assert sounds is not None
    return RequestReader(
        engine.tokenizer,
        max_length=2000,
        defaults=SamplingParams(),
        has_own_limit=False,
        streams=False,
        images=ChatImages.of(images.arch, images.processor, engine.tokenizer, images.videos)
        if images is not None
        else None,
        sounds=ChatSounds.of(sounds.arch, sounds.processor, engine.tokenizer),
    )


def make(folder: Path, kind: str, **options: Any) -> Made:
    reference = write_sound_model(folder, kind)
    return Made(folder, reference, Engine.from_pretrained(folder, compile=False, device="cpu", **options))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return make(tmp_path_factory.mktemp("qwen"), "qwen-2-audio")


def test_every_family_is_compared():
    kinds = [*SOUND_KINDS.values(), VOXTRAL]
    assert {f"{kind.name}ForConditionalGeneration" for kind in kinds} == set(SOUND_READERS)


@pytest.mark.parametrize("kind", SOUND_KINDS)
def test_chats_with_sounds_are_those_of_transformers(tmp_path, kind):
    reader = SOUND_READERS[f"{SOUND_KINDS[kind].name}ForConditionalGeneration"]
    if reader.needs_timm:
        pytest.importorskip("timm")
    model = make(tmp_path, kind, block_size=4, max_step_tokens=50)
    chats = [ONE, NONE, *([] if reader.reads_one else [TWO_LONG if kind in FILLED_UP else TWO])]
    prompts, sounds = zip(*(model.prompt(*one) for one in chats), strict=True)
    found = model.engine.generate(prompts, GREEDY, logprobs=1, media=sounds)
    for one, ids, own, completion in zip(chats, prompts, sounds, found, strict=True):
        inputs = model.theirs(*one)
        assert ids == inputs["input_ids"][0].tolist()
        if own:
            features = torch.cat([sound.features for sound in own])
            torch.testing.assert_close(features, model.embedded(inputs, ids), atol=1e-4, rtol=0)
        check(completion, model.logits(inputs, [*ids, *completion.token_ids])[len(ids) - 1 : -1])


@pytest.mark.parametrize("kind", SOUND_KINDS)
def test_encoders_of_sounds_run_in_bfloat16(tmp_path, kind):
    if SOUND_READERS[f"{SOUND_KINDS[kind].name}ForConditionalGeneration"].needs_timm:
        pytest.importorskip("timm")
    model = make(tmp_path, kind, dtype="bfloat16")
    _, [sound] = model.prompt(*ONE)
    assert sound.features.dtype == torch.bfloat16
    assert sound.features.isfinite().all()


def test_two_sounds_never_share_blocks_and_the_same_sound_does(made):
    engine = Engine.from_pretrained(made.folder, compile=False, device="cpu", block_size=4, max_step_tokens=5)
    other = ([PART, text("What is this?")], (wav(samples_of(7, 1.7)),))
    ids, sounds = made.prompt(*ONE)
    same_ids, others = made.prompt(*other)
    assert ids == same_ids  # of the same length
    [first] = engine.generate([ids], GREEDY, media=[sounds])
    [second] = engine.generate([ids], GREEDY, media=[others])
    made.check(*other, ids, second)
    assert second.counts is not None
    assert second.counts.num_cached == ids.index(ID["<|audio|>"]) // 4 * 4
    [again] = engine.generate([ids], GREEDY, media=[made.prompt(*ONE)[1]])
    assert again.token_ids == first.token_ids
    assert again.counts is not None
    assert again.counts.num_cached == (len(ids) - 1) // 4 * 4


def test_embeddings_are_kept_by_content(made, monkeypatch):
    _, [before] = made.prompt(*ONE)
    sounds = made.engine.sounds
    assert sounds is not None
    monkeypatch.setattr(sounds.processor, "inputs_of", None)  # it would fail
    assert made.prompt(*ONE)[1] == [before]


def test_preempted_requests_read_their_sounds_again(made):
    small = Engine.from_pretrained(made.folder, compile=False, device="cpu", block_size=4, num_blocks=45)
    chats = [ONE, TWO, ONE]
    prompts, sounds = zip(*(made.prompt(*one) for one in chats), strict=True)
    found = small.generate(prompts, GREEDY, media=sounds)
    assert small.state.num_preempted > 0
    for one, ids, completion in zip(chats, prompts, found, strict=True):
        made.check(*one, ids, completion)


def test_tokens_are_proposed_behind_sounds(made):
    engine = Engine.from_pretrained(made.folder, compile=False, device="cpu", speculation="ngram", speculate_k=3)
    ids, sounds = made.prompt(*ONE)
    [found] = engine.generate([ids], GREEDY, media=[sounds])
    made.check(*ONE, ids, found)


def test_the_decoder_alone_is_quantized_and_adapted(made, tmp_path):
    quantized = Engine.from_pretrained(made.folder, compile=False, device="cpu", quantization="int8")
    assert any(isinstance(layer, Int8Linear) for layer in quantized.model.modules())
    read = made.chat(*ONE).files.sounds
    ids, sounds = made.prompt(*ONE)
    assert torch.equal(quantized.encode_sounds(read)[0].features, sounds[0].features)
    name = "language_model.model.layers.1.self_attn.q_proj"
    shape = tuple(load_file(made.folder / "model.safetensors")[f"{name}.weight"].shape)
    write_adapter(tmp_path / "adapter", {name: shape})
    made.engine.load_adapter("own", tmp_path / "adapter")
    [found, plain] = [made.engine.generate([ids], GREEDY, adapter=name, media=[sounds])[0] for name in ("own", "")]
    assert found.token_ids != plain.token_ids
    made.check(*ONE, ids, plain)


RANK = """
import os, sys
import torch
from pathlib import Path
from flambeau.llm.core.sequence import EncodedMedia
from flambeau.llm.loader import load_engine, load_follower
from flambeau.llm.sampling_params import SamplingParams
import json

torch.set_num_threads(1)
folder, prompt = Path(sys.argv[1]), json.loads(sys.argv[3])
options = {"tensor_parallel_size": 2, "num_blocks": 100, "block_size": 4, "compile": False, "device": "cpu"}
if os.environ["RANK"] != "0":
    load_follower(folder, **options)()
else:
    import numpy as np
    from flambeau.llm.sounds.sound_clip import SoundClip

    engine = load_engine(folder, max_step_tokens=20, **options)
    sound = SoundClip(samples=np.load(folder / "sound.npy"), rate=16000, name="")
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    found = engine.generate([prompt, prompt[-4:]], params, media=[engine.encode_sounds([sound]), []])
    print(json.dumps(found[0].token_ids))
    engine.close()
"""


def test_two_ranks_read_sounds(made):
    ids, _ = made.prompt(*ONE)
    np.save(made.folder / "sound.npy", samples_in(LONG))
    for tokens in run_ranks(made.folder, 2, RANK, ids):
        made.check(*ONE, ids, Completion(token_ids=tokens))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (wav(samples_of(1, 2.5)), r"sound 0: the sound is 2.5 s long; the limit is 2 s: send it in parts"),
        (wav(np.zeros(0, np.float32)), "no samples"),
        (wav(np.zeros(1, np.float32)), "too short for this model; send a longer one"),
        (LONG[:30], "cut off"),
        (LONG[:999], "cut off: 955 of 54400 bytes of samples are there; send the whole file"),
        (b"no sound at all", "not a WAV file; for other formats the server needs soundfile|not a sound file"),
        (wav(samples_of(1, 0.5), rate=767_999), "767999 samples per second, which cannot be converted to 16000"),
        (wav(np.zeros(99, np.float32), rate=1), "99.0 s long; the limit is 2 s"),
        (wav(np.zeros(99, np.float32), rate=2_000_000_000), "which is not supported; send 1 or 2 channels"),
    ],
)
def test_a_sound_that_is_not_read_is_refused_at_once(made, data, reason):
    began = time.monotonic()
    with pytest.raises(InvalidField, match=reason) as caught:
        made.chat([PART], [data])
    assert caught.value.field == "sound 0"
    assert time.monotonic() - began < 5


def test_sounds_together_are_no_longer_than_the_limit(made, monkeypatch):
    monkeypatch.setattr("flambeau.handlers.generation.chat_sounds.LONGEST_S", 3.0)
    with pytest.raises(InvalidField, match=r"sound 1: the sounds of a request may have 3 s in all, of which 1.3 s"):
        made.chat([PART, PART], [LONG, LONG])


def test_other_rates_and_channels_are_converted(made):
    [plain] = made.chat([PART], [LONG]).files.sounds
    [other] = made.chat([PART], [wav(samples_of(1, 1.7, rate=44_100), rate=44_100)]).files.sounds
    assert len(other.samples) == len(plain.samples)


def test_a_second_sound_is_refused_where_transformers_takes_one(tmp_path):
    model = make(tmp_path, "glm-asr")
    with pytest.raises(InvalidField, match="sound 1 is a second sound, and this model reads one sound in a chat"):
        model.chat([PART, PART], [SHORT, SHORT])
    with pytest.raises(InvalidField, match=r"is 4.2 s long; the limit is 4 s"):
        model.chat([PART], [wav(samples_of(1, 4.2))])  # transformers would leave 0.2 s out


def test_a_prompt_without_places_for_its_sounds_is_rejected(made):
    with pytest.raises(InvalidRequest, match="send sounds in the messages of a chat"):
        made.engine.generate([[5, ID["<|audio|>"], 60]], media=[made.prompt(*ONE)[1]])


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("processor_config.json", {"processor_class": "OtherProcessor"}, "OtherProcessor; supported is Qwen2AudioP"),
        ("preprocessor_config.json", {"feature_extractor_type": "NoSuch"}, "transformers cannot read sounds"),
        ("preprocessor_config.json", {"feature_size": 9}, None),
    ],
)
def test_what_cannot_be_read_is_rejected_by_name(made, tmp_path, name, changes, reason):
    model = copy(made.folder, tmp_path, name, **changes)
    assert Engine.from_pretrained(model, compile=False, device="cpu", read_sounds=False).sounds is None
    if reason is not None:
        with pytest.raises(CheckpointError, match=reason):
            Engine.from_pretrained(model, compile=False, device="cpu")


def test_without_transformers_it_is_a_model_of_text_and_says_so(made, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "transformers", None)
    engine = Engine.from_pretrained(made.folder, compile=False, device="cpu")
    assert "requests with sounds are refused" in caplog.text
    with pytest.raises(InvalidRequest, match="reads no sounds"):
        engine.encode_sounds(made.chat(*ONE).files.sounds)


def test_a_quantized_copy_that_would_lose_the_encoder_is_refused(made):
    with pytest.raises(CheckpointError, match="reads sounds, and a quantized copy would lose the encoder of sounds"):
        check_weights(made.folder)


def test_a_folder_without_settings_of_sounds_still_reads_images(tmp_path, caplog):
    write_sound_model(tmp_path, "gemma-4")
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Gemma4Processor"}))
    engine = Engine.from_pretrained(tmp_path, compile=False, device="cpu")
    assert engine.images is not None
    assert engine.sounds is None
    assert "no settings of an extractor of sounds" in caplog.text


def test_an_adapter_that_changes_the_encoder_is_refused(made, tmp_path):
    write_adapter(tmp_path / "adapter", {"audio_tower.layers.0.self_attn.q_proj": (16, 16)})
    with pytest.raises(CheckpointError, match="audio_tower"):
        made.engine.load_adapter("tower", tmp_path / "adapter")


def test_files_of_new_versions_have_other_names(made, tmp_path):
    folder = copy(made.folder, tmp_path)
    tensors = load_file(made.folder / "model.safetensors")
    names = ((r"^language_model\.lm_head", "lm_head"), (r"^language_model\.model\.", "model.language_model."))
    names = (*names, (r"^(audio_tower|multi_modal_projector)\.", r"model.\1."))
    newer = {reduce(lambda name, one: re.sub(*one, name), names, name): tensor for name, tensor in tensors.items()}
    assert newer.keys() & tensors.keys() <= {"lm_head.weight"}
    save_file(newer, folder / "model.safetensors", {"format": "pt"})
    engine = Engine.from_pretrained(folder, compile=False, device="cpu")
    ids, sounds = made.prompt(*ONE)
    assert torch.equal(engine.encode_sounds(made.chat(*ONE).files.sounds)[0].features, sounds[0].features)
    made.check(*ONE, ids, engine.generate([ids], GREEDY, media=[sounds])[0])


def test_classes_that_are_not_read_are_refused_with_the_reason():
    for name, reason in REFUSED.items():
        with pytest.raises(CheckpointError, match=f"{name} is not supported, because {reason}; use another model that"):
            family_of({"architectures": [name]})


def test_sizes_that_files_leave_out_are_those_of_transformers():
    import transformers

    for name, reader in SOUND_READERS.items():
        config = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))()
        given = {**config.text_config.to_dict(), **(config.text_config.rope_parameters or {})}
        sizes = {key: value for key, value in reader.text_sizes.items() if key != "eos_token_id"}
        assert {key: given[key] for key in sizes} == sizes
        assert reader.sound_id == config.audio_token_id or (reader.sound_id, config.audio_token_id) == (24, None)


def test_voxtral_reads_its_prompt_from_tekken(tmp_path):
    import transformers

    reference = write_voxtral(tmp_path)
    model = Made(tmp_path, reference, Engine.from_pretrained(tmp_path, compile=False, device="cpu", max_step_tokens=90))
    ids, sounds = model.prompt([PART, text("Hi"), PART], (SHORT, wav(samples_of(1, 31.0))))
    begin, audio, hi = 25, 24, [48 + byte for byte in b"Hi"]
    assert ids == [1, 3, begin, *[audio] * 375, *hi, begin, *[audio] * 750, 4]  # as mistral-common 1.13 writes it
    [found] = model.engine.generate([ids], GREEDY, logprobs=1, media=[sounds])
    extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path)
    options = {"sampling_rate": RATE, "padding": True, "truncation": False, "pad_to_multiple_of": 480_000}
    features = transformers.VoxtralProcessor._retrieve_input_features(
        SimpleNamespace(feature_extractor=extractor),
        [samples_in(SHORT), samples_of(1, 31.0)],
        3000,
        return_tensors="pt",
        **options,
    )
    inputs = {"input_features": features}
    own = torch.cat([sound.features for sound in sounds])
    torch.testing.assert_close(own, model.embedded(inputs, ids), atol=1e-4, rtol=0)
    logits = model.logits(inputs, [*ids, *found.token_ids])[len(ids) - 1 : -1]
    check(found, logits)
    tokenizer = model.engine.tokenizer
    assert tokenizer is not None
    asked = {"role": "user", "content": [text("a"), text("b"), PART]}
    ids = tokenizer.encode_chat([asked], expansions={"[AUDIO]": ["[BEGIN_AUDIO][AUDIO]"]})
    assert ids == [1, 3, *(48 + byte for byte in b"a\n\nb"), begin, audio, 4]
    with pytest.raises(InvalidRequest, match="no system message beside sounds"):
        tokenizer.encode_chat([{"role": "system", "content": "a"}, asked])
