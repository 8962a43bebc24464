"""Models of the Hugging Face hub: names, the choice of files, and the download into the hub's cache."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from flambeau.archive.manifest import MODEL_SUFFIXES
from flambeau.archive.pretrained import check_weights
from flambeau.errors import ConfigError
from flambeau.serving.model_sources.store import ARCHIVE_SUFFIXES
from flambeau.serving.model_sources.urls import HUB_NAME

logger = logging.getLogger(__name__)

# .py files are left out on purpose: a model's own code is never run (trust_remote_code is off).
DOCUMENTS = (".json", ".txt", ".model", ".jinja", ".md", ".spm", ".tiktoken")
SHARD = re.compile(r"-\d+-of-\d+$")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order of preference: the second is a pickle
WEIGHT_FOLDERS = ("", "0_Transformer/")
INSTALL = "pip install 'flambeau[transformers]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """`org/name`, with a branch, a tag or a commit after `@`."""

    repo: str
    revision: str | None = None

    @property
    def model_name(self) -> str:
        return self.repo.partition("/")[2]

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def read_hub_name(path: Path) -> HubName | None:
    """The hub's name that a path on the command line spells; None if it can only mean a path."""
    found = HUB_NAME.fullmatch(str(path))
    if found is None or path.exists():
        return None
    repo: str = found["repo"]
    if repo.endswith((".py", *MODEL_SUFFIXES, *ARCHIVE_SUFFIXES)) or Path(repo).parent.is_dir():
        return None  # a misspelled path
    return HubName(repo=repo, revision=found["revision"])


def choose_files(files: Sequence[str]) -> list[str]:
    """The files of a repository that are needed: documents, and weights in one format, safetensors if it is there."""
    chosen = [name for name in files if name.endswith(DOCUMENTS) and name.count("/") < 2]
    for folder in WEIGHT_FOLDERS:
        own = [name for name in files if str(PurePosixPath(name).parent) == (folder.rstrip("/") or ".")]
        chosen += choose_weights(own)
    if not any(name.endswith((".safetensors", ".bin")) for name in chosen):
        chosen += [name for name in ("model.onnx", "onnx/model.onnx") if name in files][:1]
    return chosen


def choose_weights(files: Sequence[str]) -> list[str]:
    """The weights among the files of one folder: a whole file, the parts of one, or whatever safetensors there are."""
    for wanted in WEIGHTS:
        stem, _, suffix = wanted.rpartition(".")
        whole = [name for name in files if PurePosixPath(name).name == wanted]
        parts = [name for name in files if SHARD.sub("", PurePosixPath(name).stem) == stem and name.endswith(suffix)]
        if whole or parts:
            return whole or parts
        if suffix == "safetensors" and (others := [name for name in files if name.endswith(".safetensors")]):
            return others
    return []


def fetch(name: HubName) -> Path:
    """The folder of a model in the hub's cache; what is missing there is downloaded.

    Without a connection, or with HF_HUB_OFFLINE=1, the cached files are used.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise ConfigError(
            f"there is no folder {name}, so that it is taken for a model of the Hugging Face hub; to download it: "
            f"{INSTALL}"
        ) from None
    for library in ("httpx", "httpx2"):  # one line for each file otherwise
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        info = huggingface_hub.HfApi(library_name="flambeau").model_info(name.repo, revision=name.revision)
        files = choose_files([entry.rfilename for entry in info.siblings or []])
        if not any(file.endswith((".safetensors", ".bin", ".onnx")) for file in files):
            raise ConfigError(f"{name} has no weights that PyTorch can read: no .safetensors and no pytorch_model.bin")
        folder = Path(
            huggingface_hub.snapshot_download(
                name.repo, revision=name.revision, allow_patterns=files, library_name="flambeau"
            )
        )
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{name.repo} has no revision {name.revision!r} on the hub; give a branch, a tag or a commit"
        ) from None
    except ConfigError:
        raise
    except Exception as error:  # the hub's client raises errors of several libraries
        folder = find_cached(huggingface_hub, name, explain(errors, name, error))
    check_weights(folder)
    logger.info("%s is revision %s, in %s", name.repo, folder.name, folder)
    return folder


def find_cached(hub: Any, name: HubName, reason: str) -> Path:
    """The cached folder, with a warning; ConfigError with the reason if there is none."""
    try:
        # Only config.json is required here: which weights were chosen is not known without the hub.
        found = hub.snapshot_download(
            name.repo, revision=name.revision, local_files_only=True, allow_patterns=["config.json", "modules.json"]
        )
    except Exception:  # not cached, or damaged
        raise ConfigError(reason) from None
    logger.warning("%s is served from the cache: %s", name, reason.partition(";")[0])
    return Path(found)


def explain(errors: Any, name: HubName, error: Exception) -> str:
    """What a failed call means and what to do."""
    from huggingface_hub import constants

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name.repo} is gated; accept its terms at {constants.ENDPOINT}/{name.repo}, and set HF_TOKEN to a token "
            "of that account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{constants.ENDPOINT} has no model {name.repo}, or it is private; check the spelling, and set HF_TOKEN "
            f"for a private one. A local folder would be ./{name.repo}, which does not exist"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and {name} is not in {constants.HF_HUB_CACHE}; unset it to download the model"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return f"{constants.ENDPOINT} rejects the token; set HF_TOKEN to a valid one (hf auth login)"
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return (
        f"{name} cannot be downloaded from {constants.ENDPOINT} ({text}); check the connection and try again. "
        f"A local folder would be ./{name.repo}, which does not exist"
    )
