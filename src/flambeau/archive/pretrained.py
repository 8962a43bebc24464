"""Which built-in handler serves a Hugging Face folder, and for which task; read from JSON and the model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.archive.ranking_forms import form_of_card
from flambeau.errors import ConfigError
from flambeau.small_files import read_small

ENGINE, EMBEDDER, TRANSFORMERS = "gpt_handler", "sentence_embedder", "transformers"
TASKS = (
    "text-classification",
    "token-classification",
    "zero-shot-classification",
    "question-answering",
    "summarization",
    "translation",
    "text2text-generation",
    "fill-mask",
    "text-ranking",
    "image-classification",
    "object-detection",
    "automatic-speech-recognition",
    "audio-classification",
    "text-to-speech",
)
ALIASES = {
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "text-to-audio": "text-to-speech",
}
RANKING = "text-ranking"
UNKNOWN_RANKING = (
    "The model card says text-ranking, but shows no known prompt: it generates text. For scores, put `handler: {name: "
    "transformers, task: text-ranking, ranking: …}` into its model-config.yaml"
)
SUFFIXES = {  # of the class in `architectures` → tasks of that class, the default first
    "ForSequenceClassification": ("text-classification", "zero-shot-classification", "text-ranking"),
    "ForTokenClassification": ("token-classification",),
    "ForQuestionAnswering": ("question-answering",),
    "ForQuestionAnsweringSimple": ("question-answering",),
    "ForMaskedLM": ("fill-mask",),
    "WithLMHeadModel": ("fill-mask",),
    "ForPreTraining": ("fill-mask",),
    "ForImageClassification": ("image-classification",),
    "ForImageClassificationWithTeacher": ("image-classification",),
    "ForObjectDetection": ("object-detection",),
    "ForCTC": ("automatic-speech-recognition",),
    "ForSpeechSeq2Seq": ("automatic-speech-recognition",),
    "ForAudioClassification": ("audio-classification",),
    "VitsModel": ("text-to-speech",),
    "MTModel": ("translation", "summarization", "text2text-generation"),
}
LANGUAGE_MODELS = (  # with encoders of images or sounds, of which the engine may leave out some
    "AriaForConditionalGeneration",
    "AudioFlamingo3ForConditionalGeneration",
    "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "CohereCompassForConditionalGeneration",
    "DeepseekOcr2ForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration",
    "Dots3NoteForConditionalGeneration",
    "Ernie4_5_VLMoeForConditionalGeneration",
    "Ernie4_5_VL_MoeForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "FastVlmForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "Glm5NextForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "Granite4VisionForConditionalGeneration",
    "GraniteDoclingForConditionalGeneration",
    "HunYuanVLForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "Lfm3VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "MiniCPMOcrForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MistralLarge4ForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3",
    "Ovis2ForConditionalGeneration",
    "PaddleOCRVLForConditionalGeneration",
    "PerceptionLMForConditionalGeneration",
    "QianfanOCRForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "Step3p7ForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)
SPEECH_GENERATORS = ("whisper", "speech_to_text", "speech-encoder-decoder", "speecht5")
AUDIO_ENCODERS = (
    "wav2vec2",
    "wav2vec2-bert",
    "wav2vec2-conformer",
    "hubert",
    "wavlm",
    "unispeech",
    "unispeech-sat",
    "sew",
    "sew-d",
    "data2vec-audio",
)
TRANSLATORS = ("marian", "m2m_100", "mbart", "nllb-moe", "fsmt")
TEXT_GENERATORS = (  # encoder and decoder, text to text
    *TRANSLATORS,
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "encoder-decoder",
    "led",
    "longt5",
    "mt5",
    "mvp",
    "pegasus",
    "pegasus_x",
    "plbart",
    "prophetnet",
    "switch_transformers",
    "t5",
    "umt5",
)
EXAMPLES: Mapping[str, dict[str, Any]] = {  # a request for each task that takes JSON
    "text-classification": {"inputs": "What a fine day"},
    "token-classification": {"inputs": "Ada lives in London", "parameters": {"aggregation_strategy": "simple"}},
    "zero-shot-classification": {
        "inputs": "The rocket has landed",
        "parameters": {"candidate_labels": ["space", "cooking"]},
    },
    "question-answering": {"inputs": {"question": "Where does Ada live?", "context": "Ada lives in London."}},
    "summarization": {"inputs": "The tower is 324 metres tall, about as tall as a building of 81 floors."},
    "translation": {"inputs": "The house is wonderful."},
    "text2text-generation": {"inputs": "The house is wonderful."},
    "text-to-speech": {"inputs": "Hello there"},
    "text-ranking": {"query": "What is a cat?", "texts": ["A cat is an animal", "The sea is deep"]},
}
GENERATED_TASKS = ("summarization", "translation", "text2text-generation")
WEIGHTS = ("*.safetensors", "*.bin", "*.onnx", "onnx/*.onnx", "0_*/*.safetensors", "0_*/*.bin")
CARD_BYTES = 1 << 20
DOCUMENT_BYTES = 64 << 20  # the index of a large checkpoint, or many thousand labels, has a few MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedModel:
    """The handler that serves a folder; `task` is empty except for `transformers`."""

    handler: str
    task: str = ""
    reason: str = ""


def is_pretrained(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face model: its config.json, or modules.json of sentence-transformers."""
    try:
        return (folder / "modules.json").is_file() or bool(
            read_document(folder / "config.json").keys() & {"architectures", "model_type"}
        )
    except ConfigError:
        return False


def choose_handler(folder: Path, task: str = "") -> PretrainedModel:
    """What serves this folder; ConfigError if nothing does. `task` is the user's choice, if any."""
    config = read_document(folder / "config.json")
    names = [str(name) for name in as_list(config.get("architectures"))]
    tag = ALIASES.get(task, task) or read_tag(folder)
    if task:
        if tag not in TASKS:
            raise ConfigError(f"the task {task!r} is not supported; supported are {', '.join(TASKS)}")
        return PretrainedModel(handler=TRANSFORMERS, task=tag, reason="the task is configured")
    if "LogitScore" in module_kinds(folder):
        reason = "modules.json describes a language model that ranks texts"
        return PretrainedModel(handler=TRANSFORMERS, task=RANKING, reason=reason)
    if form := form_of_card(folder, config, tag):
        reason = f"the model card shows the prompt of {form}"
        return PretrainedModel(handler=TRANSFORMERS, task=RANKING, reason=reason)
    if (folder / "modules.json").is_file() and not any(name.endswith("ForSequenceClassification") for name in names):
        return PretrainedModel(handler=EMBEDDER, reason="modules.json describes a sentence-transformers model")
    for name in names or [""]:
        if found := choose_by_class(name, config, tag):
            return found
    raise ConfigError(refusal(folder, names, config))


def other_use(folder: Path) -> str:
    """Why a folder whose class generates text is not served for that by `flambeau serve`; empty if it is."""
    try:
        chosen = choose_handler(folder)
    except ConfigError:
        return ""  # its reader reports what is wrong with it
    return chosen.reason if chosen.handler == EMBEDDER or chosen.task == RANKING else ""


def module_kinds(folder: Path) -> list[str]:
    """The classes of the steps in modules.json; empty if there is no such file."""
    try:
        document = json.loads(read_small(folder / "modules.json"))
    except (OSError, ValueError, RecursionError):
        return []  # its reader reports what is wrong with it
    steps = [step for step in as_list(document) if isinstance(step, Mapping)]
    return [str(step.get("type", "")).rpartition(".")[2] for step in steps]


def configured_task(options: Mapping[str, Any]) -> str:
    """`task` in the handler section of a model-config; empty if there is none."""
    section = options.get("handler")
    task = section.get("task") if isinstance(section, Mapping) else None
    return task if isinstance(task, str) else ""


def choose_by_class(name: str, config: Mapping[str, Any], tag: str) -> PretrainedModel | None:
    kind = str(config.get("model_type", ""))
    reason = f"config.json names {name}" if name else f"config.json has the model_type {kind}"
    is_gpt = name.endswith("LMHeadModel") and kind in ("gpt2", "openai-gpt")
    if name.endswith("ForCausalLM") or is_gpt or name in LANGUAGE_MODELS:
        hint = f". {UNKNOWN_RANKING}" if tag == RANKING else ""
        return PretrainedModel(handler=ENGINE, reason=reason + hint)
    if tasks := choose_tasks(name, kind):
        task = tag if tag in tasks else guess_task(tasks, config)
        hint = f", and the model card says {tag}" if tag == task and len(tasks) > 1 else ""
        return PretrainedModel(handler=TRANSFORMERS, task=task, reason=reason + hint)
    if name.endswith("Model") and not name.endswith(("DecoderModel", "EncoderModel")):
        return PretrainedModel(handler=EMBEDDER, reason=f"{reason}, an encoder without a head")
    return None


def choose_tasks(name: str, kind: str) -> tuple[str, ...]:
    """The tasks that a class of transformers can do."""
    if name.endswith("ForConditionalGeneration") or name in ("EncoderDecoderModel", "SpeechEncoderDecoderModel"):
        if kind in SPEECH_GENERATORS:
            return ("automatic-speech-recognition",)
        return GENERATED_TASKS if kind in TEXT_GENERATORS else ()
    if name.endswith("ForSequenceClassification") and kind in AUDIO_ENCODERS:
        return ("audio-classification",)
    if name.endswith("WithLMHeadModel") and kind not in ("flaubert", "xlm"):
        return ()
    return next((tasks for suffix, tasks in SUFFIXES.items() if name.endswith(suffix)), ())


def guess_task(tasks: tuple[str, ...], config: Mapping[str, Any]) -> str:
    """The task where the class has several and the model card names none."""
    if "zero-shot-classification" in tasks:
        if any(str(label).lower().startswith("entail") for label in labels_of(config)):
            return "zero-shot-classification"
        is_cross_encoder = "sentence_transformers" in config or "sbert_ce_default_activation_function" in config
        return "text-ranking" if is_cross_encoder and len(labels_of(config)) == 1 else tasks[0]
    if tasks == GENERATED_TASKS:
        specific = config.get("task_specific_params")
        if config.get("model_type") in TRANSLATORS:
            return "translation"
        if config.get("model_type") in ("pegasus", "pegasus_x", "bigbird_pegasus", "led"):
            return "summarization"
        only = isinstance(specific, Mapping) and [*specific] == ["summarization"]
        return "summarization" if only else "text2text-generation"
    return tasks[0]


def labels_of(config: Mapping[str, Any]) -> list[Any]:
    labels = config.get("id2label")
    if isinstance(labels, Mapping):
        return [*labels.values()]
    count = config.get("num_labels", 2)
    return [""] * count if isinstance(count, int) else []


def refusal(folder: Path, names: list[str], config: Mapping[str, Any]) -> str:
    what = " and ".join(names) or f"the model_type {config.get('model_type')!r} without architectures"
    code = "; its own code (auto_map) is not run, since trust_remote_code is off" if "auto_map" in config else ""
    if any(name.endswith("ForConditionalGeneration") for name in names):
        code += f"; if it writes text, `flambeau llm serve {folder}` may serve that"
    return (
        f"config.json of {folder.name} names {what}, which no built-in handler serves{code}. Served are "
        f"language models (…ForCausalLM), sentence-transformers, and these tasks: {', '.join(TASKS)}. If it can do one "
        "of them, put `handler: {name: transformers, task: TASK}` into its model-config.yaml, else write a handler.py"
    )


def example_of(folder: Path, task: str) -> dict[str, Any] | None:
    """A request that the model in this folder can answer; None for an image or a sound."""
    if task == "fill-mask":
        token = read_document(folder / "tokenizer_config.json").get("mask_token", "[MASK]")
        token = token.get("content", "[MASK]") if isinstance(token, Mapping) else token
        return {"inputs": f"The cat sat on the {token}."}
    return EXAMPLES.get(task)


def reject_unsupported_form(path: Path) -> None:
    """Reject a GGUF file, or a folder with one only, and the folder of an adapter, with the remedy."""
    reject_adapter(path)
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"), key=is_encoder) if path.is_dir() else []
    gguf = next(iter(files), None)
    if gguf is not None and not (path / "config.json").is_file():
        raise ConfigError(
            f"{gguf} is a GGUF file, a language model without a handler: serve it with `flambeau llm serve {gguf}`, or "
            f"put `handler: {{name: gpt_handler, model_path: {gguf.name}}}` into a model-config.yaml beside it"
        )


def is_encoder(file: Path) -> bool:
    """Whether a GGUF file is called like those with the encoder of a model's images."""
    return "mmproj" in file.name.lower()


def reject_adapter(path: Path) -> None:
    """Reject the folder of an adapter, with the remedy."""
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        base = read_document(adapter).get("base_model_name_or_path") or "another model"
        raise ConfigError(
            f"{path} holds an adapter of {base} (adapter_config.json) and not a model; serve that model, with the "
            f"adapter in its model-config.yaml: `handler: {{lora_adapters: {{NAME: {path}}}}}`, or with "
            f"`flambeau llm serve FOLDER --lora NAME={path}`"
        )


def check_weights(folder: Path) -> None:
    """Reject a folder without weights, and one that lacks a file of its index: an interrupted download."""
    if not any(path.is_file() for pattern in WEIGHTS for path in folder.glob(pattern)):
        others = ", ".join(sorted(path.name for path in folder.glob("*.*") if path.suffix in (".h5", ".msgpack")))
        found = f"only {others}, which PyTorch cannot read" if others else "no weights"
        raise ConfigError(f"{folder} holds {found}; expected model.safetensors or pytorch_model.bin")
    for index in sorted(folder.glob("*.index.json")):
        files = read_document(index).get("weight_map", {})
        missing = sorted(name for name in set(files.values()) if not (folder / name).is_file())
        if missing and not (folder / index.name.removesuffix(".index.json")).is_file():
            raise ConfigError(f"{folder} lacks {', '.join(missing[:3])} of {index.name}; download the model again")


def read_tag(folder: Path) -> str:
    """`pipeline_tag` of the model card, README.md; empty if there is none."""
    try:
        head, _, text = read_small(folder / "README.md", DOCUMENT_BYTES).decode(errors="replace").partition("\n")
    except OSError:
        return ""
    front, fence, _ = text[:CARD_BYTES].partition("\n---")
    if head.strip() != "---" or not fence:
        return ""
    import yaml  # loaded only for models with a card

    try:
        card = yaml.load(front, yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return ""
    tag = card.get("pipeline_tag") if isinstance(card, Mapping) else None
    return tag if isinstance(tag, str) else ""


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no such file."""
    try:
        document = json.loads(read_small(path, DOCUMENT_BYTES))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return document


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
