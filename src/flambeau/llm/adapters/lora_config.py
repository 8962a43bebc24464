"""LoraConfig: adapter_config.json as PEFT writes it. What would change the result and is not supported is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.json_files import read_object

CONFIG_FILE = "adapter_config.json"
READ = (
    "peft_type",
    "peft_version",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "alpha_pattern",
    "bias",
    "init_lora_weights",
    "trainable_token_indices",
    "modules_to_save",
)
# The tensors in the file show which layers are adapted, and with which ranks; the others matter in training only.
WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_bias",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "task_type",
    }
)
NOT_SUPPORTED = {
    "layer_replication": "replicated layers are not supported",
    "alora_invocation_tokens": "adapters that start at a token (aLoRA) are not supported",
    "use_qalora": "adapters of pooled inputs (QALoRA) are not supported",
    "use_bdlora": "adapters of block-diagonal matrices (BD-LoRA) are not supported",
    "arrow_config": "adapters that are chosen by a router (Arrow) are not supported",
    "kasa_config": "adapters of singular values (KaSA) are not supported",
    "monteclora_config": "adapters with sampled weights (MonteCLoRA) are not supported",
}
BIASES = ("none", "all", "lora_only")
# Initial values that leave the weights of the model as they are; PiSSA, OLoRA, LoftQ and others change them.
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
MERGE = "merge it into its model (`merge_and_unload` of peft), save the result and serve that folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """How strongly an adapter counts, and what it was made for."""

    alpha: float = 8.0
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)  # names of layers → their own alpha
    use_rslora: bool = False
    use_dora: bool = False  # the rows of adapted weights have lengths of their own
    token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # trained rows; "": of the embeddings
    whole_modules: tuple[str, ...] = ()  # layers that were trained as a whole
    version: tuple[int, ...] = ()  # of the PEFT that wrote it; empty: unknown
    base: str = ""  # the name of the model that it was trained on

    def scale(self, module: str, rank: int) -> float:
        """The factor of an adapted layer."""
        alpha = next(
            (alpha for key, alpha in self.alpha_pattern.items() if re.match(rf"(.*\.)?({key})$", module)), self.alpha
        )
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_lora_config(folder: Path) -> LoraConfig:
    """The configuration of the adapter in a folder; raises CheckpointError with the name of what is not supported."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}; name the folder of an adapter as PEFT saves it")
    given = read_object(file, CheckpointError)
    kind = given.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type is {kind!r}; of PEFT's adapters only LORA is supported; {MERGE}")
    for key, value in given.items():
        if key not in READ and key not in WITHOUT_EFFECT and value not in (None, False, [], {}, ""):
            reason = NOT_SUPPORTED.get(key, "this key is not known here")
            raise CheckpointError(f"{file} has {key}: {shown(value)}, and {reason}; {MERGE}")
    if given.get("bias", "none") not in BIASES:
        raise CheckpointError(f"{file}: bias must be one of {', '.join(BIASES)}, not {shown(given['bias'])}")
    if (init := given.get("init_lora_weights")) not in PLAIN_INITS:
        raise CheckpointError(
            f"{file} has init_lora_weights: {init!r}, which changes the weights of the model itself; convert the "
            "adapter to plain LoRA (`path_initial_model_for_weight_conversion` of peft's save_pretrained)"
        )
    return LoraConfig(
        alpha=number_of(file, "lora_alpha", given.get("lora_alpha", 8)),
        alpha_pattern={
            key: number_of(file, "alpha_pattern", value) for key, value in (given.get("alpha_pattern") or {}).items()
        },
        use_rslora=bool(given.get("use_rslora")),
        use_dora=bool(given.get("use_dora")),
        token_ids=token_ids_of(file, given.get("trainable_token_indices")),
        whole_modules=tuple(map(str, given.get("modules_to_save") or ())),
        version=version_of(given.get("peft_version")),
        base=str(given.get("base_model_name_or_path") or ""),
    )


def token_ids_of(file: Path, given: Any) -> dict[str, tuple[int, ...]]:
    """The trained tokens of each layer: a list is for the embeddings."""
    layers = given if isinstance(given, dict) else {"": given or []}
    for ids in layers.values():
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise CheckpointError(f"{file}: trainable_token_indices must be token ids, not {shown(given)}")
    return {layer: tuple(ids) for layer, ids in layers.items() if ids}


def version_of(given: Any) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", str(given or ""))
    return (int(found[1]), int(found[2])) if found else ()


def number_of(file: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{file}: {key} must be a number, not {shown(value)}")
    if not math.isfinite(value):
        raise CheckpointError(f"{file}: {key} must be a finite number, not {shown(value)}")
    return float(value)


def shown(value: Any) -> str:
    return repr(value)[:80]
