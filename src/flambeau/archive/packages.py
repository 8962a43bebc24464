"""The packages that the built-in handlers and the engine need, and the command that installs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from types import MappingProxyType

CPU_INDEX = " --extra-index-url https://download.pytorch.org/whl/cpu"
TORCH_BUILDS = frozenset({"torch", "torchvision", "torchaudio"})  # must all be of the same build
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "nvidia.dali": "nvidia-dali-cuda120"}


@dataclass(frozen=True, slots=True)
class PackageGroup:
    """Modules that are imported together, and the extra of this distribution that has them; "" if none has."""

    modules: tuple[str, ...]
    extra: str = ""


TORCH = PackageGroup(("torch",), "torch")
VISION = PackageGroup(("torch", "torchvision", "PIL"), "vision")
LLM = PackageGroup(("torch", "numpy", "safetensors"), "llm")
NEEDS: Mapping[str, PackageGroup] = MappingProxyType(
    {  # of each built-in handler; what only some models need is not here
        "base_handler": TORCH,
        "image_classifier": VISION,
        "image_segmenter": VISION,
        "object_detector": VISION,
        "text_classifier": TORCH,
        "onnx": PackageGroup(("onnxruntime", "numpy"), "onnx"),
        "gpt_handler": LLM,
        "transformers": PackageGroup(("torch", "numpy", "transformers"), "transformers"),
        "sentence_embedder": PackageGroup(("numpy", "tokenizers"), "embed"),
        "dali_image_classifier": PackageGroup((*VISION.modules, "nvidia.dali")),
    }
)
# For a module that a part of this package imports: any extra that has it.
EXTRAS = {
    "torch": "torch",
    "torchvision": "vision",
    "PIL": "vision",
    "onnxruntime": "onnx",
    "captum": "explain",
    "av": "video",
    "jinja2": "llm",
    "llguidance": "llm",
    "safetensors": "llm",
    "sentencepiece": "llm",
    "tokenizers": "llm",
}


def find_missing(modules: Iterable[str], path: Sequence[str]) -> list[str]:
    """The modules that cannot be imported, here or from the folders of `path`. Nothing is imported."""
    return [name for name in modules if not is_installed(name, path)]


def is_installed(module: str, path: Sequence[str] = ()) -> bool:
    top = module.partition(".")[0]
    if path and PathFinder.find_spec(top, [*path]) is not None:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of a parent that is missing
        return False


def install_line(modules: Collection[str], extra: str = "") -> str:
    """The command that installs them: by the extra of this distribution that has them, or by their own names."""
    what = f"'flambeau[{extra}]'" if extra else " ".join(map(distribution_of, modules))
    return f"pip install {what}{index_for(modules)}"


def index_for(modules: Iterable[str]) -> str:
    """The option of pip that finds the CPU builds of these modules, if torch is one; empty where none is needed."""
    return CPU_INDEX if has_cpu_torch() and not TORCH_BUILDS.isdisjoint(modules) else ""


def has_cpu_torch() -> bool:
    from importlib.metadata import PackageNotFoundError, version  # here: it takes 7 ms, and few servers need it

    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def distribution_of(module: str) -> str:
    return DISTRIBUTIONS.get(module, module.partition(".")[0])


def explain_missing(what: str, modules: Sequence[str], extra: str = "") -> str:
    """What needs these modules, that they are missing, and the remedy, in one sentence."""
    named = ", ".join(distribution_of(module) for module in modules)
    verb = "is" if len(modules) == 1 else "are"
    return f"{what} needs {named}, which {verb} not installed: {install_line(modules, extra)}"


def missing_packages(handler: str, path: Sequence[str]) -> str:
    """Why a built-in handler cannot be imported, in one sentence; empty if it can, or is not built in."""
    needs = NEEDS.get(handler)
    if needs is None or not (missing := find_missing(needs.modules, path)):
        return ""
    return explain_missing(handler, missing, needs.extra)
