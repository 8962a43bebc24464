"""Which handler serves a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flambeau.archive.manifest import manifest_of
from flambeau.archive.pretrained import (
    check_weights,
    choose_handler,
    example_of,
    is_pretrained,
    other_use,
    read_tag,
)
from flambeau.errors import ConfigError

NLI = {"id2label": {"0": "CONTRADICTION", "1": "ENTAILMENT"}}
ONE = {"id2label": {"0": "LABEL_0"}}


def write(folder: Path, card: str = "", **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if card:
        (folder / "README.md").write_text(f"---\nlicense: mit\npipeline_tag: {card}\n---\n# A model\n")
    return folder


@pytest.mark.parametrize(
    ("name", "kind", "more", "card", "wanted"),
    [
        ("LlamaForCausalLM", "llama", {}, "", ("gpt_handler", "")),
        ("GPT2LMHeadModel", "gpt2", {}, "", ("gpt_handler", "")),
        ("Gemma3ForConditionalGeneration", "gemma3", {}, "image-text-to-text", ("gpt_handler", "")),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", {}, "image-text-to-text", ("gpt_handler", "")),
        ("BertForSequenceClassification", "bert", {}, "", ("transformers", "text-classification")),
        ("BertForSequenceClassification", "bert", NLI, "", ("transformers", "zero-shot-classification")),
        ("BertForSequenceClassification", "bert", NLI, "text-classification", ("transformers", "text-classification")),
        ("BertForSequenceClassification", "bert", ONE, "text-ranking", ("transformers", "text-ranking")),
        ("BertForSequenceClassification", "bert", ONE, "", ("transformers", "text-classification")),
        (
            "BertForSequenceClassification",
            "bert",
            {**ONE, "sentence_transformers": {"version": "4"}},
            "",
            ("transformers", "text-ranking"),
        ),
        ("Wav2Vec2ForSequenceClassification", "wav2vec2", {}, "", ("transformers", "audio-classification")),
        (
            "ASTForAudioClassification",
            "ast",
            {},
            "",
            ("transformers", "audio-classification"),
        ),
        ("Wav2Vec2ForCTC", "wav2vec2", {}, "", ("transformers", "automatic-speech-recognition")),
        ("VitsModel", "vits", {}, "", ("transformers", "text-to-speech")),
        ("WhisperForConditionalGeneration", "whisper", {}, "", ("transformers", "automatic-speech-recognition")),
        ("MarianMTModel", "marian", {}, "", ("transformers", "translation")),
        ("M2M100ForConditionalGeneration", "m2m_100", {}, "", ("transformers", "translation")),
        ("BartForConditionalGeneration", "bart", {}, "summarization", ("transformers", "summarization")),
        ("PegasusForConditionalGeneration", "pegasus", {}, "", ("transformers", "summarization")),
        ("T5ForConditionalGeneration", "t5", {}, "", ("transformers", "text2text-generation")),
        ("T5ForConditionalGeneration", "t5", {}, "translation", ("transformers", "translation")),
        ("BertForMaskedLM", "bert", {}, "", ("transformers", "fill-mask")),
        ("XLMWithLMHeadModel", "xlm", {}, "", ("transformers", "fill-mask")),
        ("RobertaForTokenClassification", "roberta", {}, "", ("transformers", "token-classification")),
        ("RobertaForQuestionAnswering", "roberta", {}, "", ("transformers", "question-answering")),
        ("ViTForImageClassification", "vit", {}, "", ("transformers", "image-classification")),
        ("DetrForObjectDetection", "detr", {}, "", ("transformers", "object-detection")),
        ("MPNetModel", "mpnet", {}, "sentence-similarity", ("sentence_embedder", "")),
    ],
)
def test_handler_and_task_follow_from_the_config_and_the_card(tmp_path, name, kind, more, card, wanted):
    folder = write(tmp_path, card, architectures=[name], model_type=kind, **more)
    found = choose_handler(folder)
    assert (found.handler, found.task) == wanted
    assert name in found.reason
    manifest = manifest_of(folder)
    assert manifest is not None
    assert manifest.handler == wanted[0]


def test_sentence_transformers_are_known_by_modules_json(tmp_path):
    folder = write(tmp_path, architectures=["BertForMaskedLM"], model_type="bert")
    (folder / "modules.json").write_text("[]")
    assert choose_handler(folder).handler == "sentence_embedder"


@pytest.mark.parametrize("name", ["MllamaForConditionalGeneration", "EncodecModelFor", "UNet2DConditionModelX"])
def test_what_is_not_served_is_refused_by_name_with_a_remedy(tmp_path, name):
    folder = write(tmp_path, architectures=[name], model_type="llava", auto_map={"AutoModel": "m.M"})
    with pytest.raises(ConfigError, match=rf"{name}.*trust_remote_code is off.*task: TASK"):
        choose_handler(folder)
    manifest = manifest_of(folder)
    assert manifest is not None
    assert manifest.handler == ""


def test_configured_task_comes_first_and_must_be_known(tmp_path):
    folder = write(tmp_path, "text-classification", architectures=["BertForSequenceClassification"], **NLI)
    assert choose_handler(folder, "zero-shot-classification").task == "zero-shot-classification"
    assert choose_handler(folder, "sentiment-analysis").task == "text-classification"
    with pytest.raises(ConfigError, match="the task 'dancing' is not supported"):
        choose_handler(folder, "dancing")
    (folder / "model-config.yaml").write_text("handler: {task: zero-shot-classification}\nbatchSize: 4\n")
    manifest = manifest_of(folder)
    assert manifest is not None
    assert (manifest.handler, manifest.config_file) == ("transformers", "model-config.yaml")


def test_folders_with_a_handler_of_their_own_keep_it(tmp_path):
    folder = write(tmp_path, architectures=["BertForMaskedLM"], model_type="bert")
    (folder / "handler.py").write_text("")
    (folder / "model.safetensors").write_text("")
    manifest = manifest_of(folder)
    assert manifest is not None
    assert manifest.handler == "handler.py"


def test_other_config_files_are_not_mistaken_for_a_model(tmp_path):
    assert not is_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"port": 8080}')
    assert not is_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    assert not is_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert not is_pretrained(tmp_path)


@pytest.mark.parametrize("card", ["", "no front matter", "---\nnever ends", "---\n[: \n---\n", "---\n- a list\n---\n"])
def test_odd_model_cards_have_no_tag(tmp_path, card):
    (tmp_path / "README.md").write_text(card)
    assert read_tag(tmp_path) == ""


def test_the_engine_serves_every_family_that_it_has(tmp_path):
    from flambeau.llm.models.families.table import FAMILIES

    for name, family in FAMILIES.items():
        folder = write(tmp_path / name, architectures=[name], model_type=family.model_type, auto_map={"a": "b"})
        assert choose_handler(folder).handler == "gpt_handler", name


def test_a_language_model_that_should_rank_or_embed_says_how(tmp_path):
    llama = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    unknown = choose_handler(write(tmp_path / "a", "text-ranking", **llama))
    assert unknown.handler == "gpt_handler"
    assert "ranking: …" in unknown.reason
    assert "ranking" not in choose_handler(write(tmp_path / "b", "text-generation", **llama)).reason
    assert other_use(tmp_path / "b") == other_use(tmp_path / "nothing") == ""
    (tmp_path / "b" / "modules.json").write_text("[]")
    assert "sentence-transformers" in other_use(tmp_path / "b")
    (tmp_path / "a" / "modules.json").write_text('[{"type": "sentence_transformers.LogitScore"}]')
    assert "ranks" in other_use(tmp_path / "a")


def test_other_language_models_with_images_may_be_served_as_text(tmp_path):
    folder = write(tmp_path, architectures=["OtherForConditionalGeneration"], model_type="other")
    with pytest.raises(ConfigError, match=r"`flambeau llm serve .*` may serve that"):
        choose_handler(folder)


def test_folders_without_their_weights_are_refused(tmp_path):
    write(tmp_path, architectures=["BertForMaskedLM"])
    with pytest.raises(ConfigError, match=r"no weights; expected model\.safetensors"):
        check_weights(tmp_path)
    (tmp_path / "tf_model.h5").write_text("")
    with pytest.raises(ConfigError, match=r"only tf_model\.h5, which PyTorch cannot read"):
        check_weights(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_text("")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ConfigError, match=r"lacks model-00002-of-00002\.safetensors.*download the model again"):
        check_weights(tmp_path)


def test_examples_use_the_mask_of_the_tokenizer(tmp_path):
    assert example_of(tmp_path, "fill-mask") == {"inputs": "The cat sat on the [MASK]."}
    (tmp_path / "tokenizer_config.json").write_text('{"mask_token": {"content": "<mask>"}}')
    assert example_of(tmp_path, "fill-mask") == {"inputs": "The cat sat on the <mask>."}
    assert example_of(tmp_path, "image-classification") is None
