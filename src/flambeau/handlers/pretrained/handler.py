"""TransformersHandler: serves a Hugging Face folder without code, for the task that its config.json names."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.archive.pretrained import ALIASES, RANKING, TRANSFORMERS, as_list, choose_handler, read_document
from flambeau.errors import ConfigError, HandlerError
from flambeau.handlers.device import choose_device, dtype_named, prepare
from flambeau.handlers.loaders.pretrained import Runtime, import_transformers
from flambeau.handlers.loaders.torch_compile import read_pt2
from flambeau.handlers.options import Kinds, read_handler_options, resolve_model_path, warn_of_misspelled_keys
from flambeau.handlers.pretrained.task import Task
from flambeau.handlers.pretrained.task_request import TaskRequest, read_task_request
from flambeau.handlers.request_rows import is_describe, refuse_explain

if TYPE_CHECKING:
    from flambeau.worker.context import Context

logger = logging.getLogger(__name__)

OPTIONS: Kinds = {
    "model_path": str,
    "task": str,
    "dtype": str,
    "compile": bool,
    "max_tokens": int,
    "max_new_tokens": int,
    "trust_remote_code": bool,
    "ranking": (str, dict),
    "instruction": str,
    "hf_overrides": dict,
}
RANKING_OPTIONS = ("ranking", "instruction", "hf_overrides")
CPU_TOKENS, GPU_TOKENS = 4096, 65536  # per call; larger groups on a CPU take more memory and are not faster
PACKAGE = "flambeau.handlers.pretrained"
CLASSES = {  # import strings: a text model needs neither Pillow nor torchvision
    "text-classification": f"{PACKAGE}.text_tasks:TextClassification",
    "zero-shot-classification": f"{PACKAGE}.text_tasks:ZeroShotClassification",
    "text-ranking": f"{PACKAGE}.text_tasks:TextRanking",
    "fill-mask": f"{PACKAGE}.text_tasks:FillMask",
    "token-classification": f"{PACKAGE}.token_classification:TokenClassification",
    "question-answering": f"{PACKAGE}.answers:QuestionAnswering",
    "image-classification": f"{PACKAGE}.image_tasks:ImageClassification",
    "object-detection": f"{PACKAGE}.image_tasks:ObjectDetection",
    "audio-classification": f"{PACKAGE}.audio_tasks:AudioClassification",
    "text-to-speech": f"{PACKAGE}.text_to_speech:TextToSpeech",
}


class TransformersHandler:
    """Answers in the form of transformers' pipelines; the requests of a batch are computed together."""

    abilities: Sequence[str] = ()  # those of the task

    def initialize(self, context: Context) -> None:
        options = read_handler_options(context, OPTIONS)
        if options.get("trust_remote_code"):
            raise HandlerError(
                "trust_remote_code is off: code of a repository is never run. Remove the option; if you trust the "
                "code, import it in a handler.py of your own"
            )
        warn_of_misspelled_keys(context.model_yaml_config)
        library = import_transformers()
        folder = resolve_model_path(Path(context.system_properties["model_dir"]), options.get("model_path"))
        self.task_name = find_task(folder, options.get("task", ""))
        device, _ = choose_device(context.system_properties["gpu_id"])
        prepare(device)
        dtype = options.get("dtype") or context.model_yaml_config.get("dtype")
        compiles = read_pt2(context.model_yaml_config.get("pt2"))
        if compiles is None and options.get("compile"):
            compiles = {"dynamic": True}  # one compilation for all lengths
        self.runtime = Runtime(
            folder=folder,
            device=device,
            dtype=dtype_named(str(dtype)) if dtype else None,
            compile_options=compiles,
            max_tokens=options.get("max_tokens", CPU_TOKENS if device.type == "cpu" else GPU_TOKENS),
            max_new_tokens=options.get("max_new_tokens", 1024),
            ranking={key: value for key in RANKING_OPTIONS if (value := options.get(key)) is not None},
        )
        began = time.perf_counter()
        self.task: Task = load_task(self.task_name, self.runtime)
        self.abilities = self.task.abilities
        logger.info(
            "%s is loaded for %s in %.2f s, with transformers %s on %s; trust_remote_code is off",
            context.model_name,
            self.task_name,
            time.perf_counter() - began,
            library.__version__,
            device,
        )

    def handle(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        began = time.perf_counter()
        if is_describe(context):
            return [self.describe_handle()]
        refuse_explain(context, "transformers")
        task = self.task
        requests = [self.read(row) for row in data]
        inputs = [task.prepare(request) for request in requests]
        outputs = task.run([entry for own in inputs for entry in own])
        replies, taken = [], 0
        for request, own in zip(requests, inputs, strict=True):
            replies.append(task.reply(request, own, outputs[taken : taken + len(own)]))
            taken += len(own)
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")
        return replies

    def read(self, row: Mapping[str, Any]) -> TaskRequest:
        task = self.task
        return read_task_request(
            row, task.known, fields=task.fields, is_binary=task.is_binary, speaks="speak" in task.abilities
        )

    def tensor_metadata(self) -> Any:
        """The tensors for KServe's metadata."""
        return {
            "inputs": [{"name": n, "datatype": "BYTES", "shape": s} for n, s in self.task.input_shapes.items()],
            "outputs": [{"name": n, "datatype": t, "shape": [1]} for n, t in self.task.output_types.items()],
        }

    def describe_handle(self) -> Any:
        """Information for `GET /models/NAME?customized=true`."""
        return {
            "task": self.task_name,
            "parameters": [*self.task.known],
            "device": str(self.runtime.device),
            **self.task.describe(),
        }


def find_task(folder: Path, task: str) -> str:
    """The configured task, or the one that config.json names."""
    if not (folder / "config.json").is_file():
        raise HandlerError(
            f"there is no config.json in {folder}; model_path must be the folder of a Hugging Face model"
        )
    try:
        chosen = choose_handler(folder, ALIASES.get(task, task))
    except ConfigError as error:
        raise HandlerError(str(error)) from None
    if chosen.handler != TRANSFORMERS:
        raise HandlerError(f"{folder.name} is a model for {chosen.handler}, not for transformers: {chosen.reason}")
    return chosen.task


def load_task(name: str, runtime: Runtime) -> Task:
    """The task with its network loaded."""
    build: Callable[[Runtime], Task]
    if name == RANKING and is_language_model(runtime.folder):
        from flambeau.handlers.pretrained.token_ranker import TokenRanking

        return TokenRanking(runtime)
    if runtime.ranking:
        raise HandlerError(
            f"{', '.join(runtime.ranking)} is for language models that rank texts (…ForCausalLM, task: text-ranking); "
            "remove it from the handler section"
        )
    if name in CLASSES:
        module, _, class_name = CLASSES[name].partition(":")
        build = getattr(importlib.import_module(module), class_name)
        return build(runtime)
    if name == "automatic-speech-recognition":
        tasks = importlib.import_module(f"{PACKAGE}.speech_tasks")
        build = tasks.CtcRecognition if is_ctc(runtime.folder) else tasks.GeneratedTranscript
        return build(runtime)
    from flambeau.handlers.pretrained.generated_text import GeneratedText

    return GeneratedText(runtime, name)


def is_language_model(folder: Path) -> bool:
    names = as_list(read_document(folder / "config.json").get("architectures"))
    return any(str(name).endswith("ForCausalLM") for name in names)


def is_ctc(folder: Path) -> bool:
    """Whether a speech model has one output per frame, by its class in config.json."""
    names = as_list(read_document(folder / "config.json").get("architectures"))
    return any(str(name).endswith("ForCTC") for name in names)
