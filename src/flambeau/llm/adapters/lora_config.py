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
READ = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "alpha_pattern", "bias", "init_lora_weights")
# The tensors in the file show which layers are adapted, and with which ranks; the others matter in training only.
WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
NOT_SUPPORTED = {
    "modules_to_save": "layers that were trained as a whole are not supported",
    "trainable_token_indices": "trained token embeddings are not supported",
    "target_parameters": "adapters of plain parameters, such as those of experts, are not supported",
    "layer_replication": "replicated layers are not supported",
    "lora_bias": "biases of adapters are not supported",
    "alora_invocation_tokens": "adapters that start at a token (aLoRA) are not supported",
}
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
        raise CheckpointError(f"{file}: peft_type is {kind!r}; of PEFT's adapters only LORA is supported")
    for key, value in given.items():
        if key not in READ and key not in WITHOUT_EFFECT and value not in (None, False, [], {}, ""):
            reason = NOT_SUPPORTED.get(key, "this key is not known here")
            raise CheckpointError(f"{file} has {key}: {shown(value)}, and {reason}; {MERGE}")
    if given.get("bias", "none") != "none":
        raise CheckpointError(f"{file} has bias: {given['bias']!r}, and trained biases are not supported; {MERGE}")
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
        base=str(given.get("base_model_name_or_path") or ""),
    )


def number_of(file: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{file}: {key} must be a number, not {shown(value)}")
    return float(value)


def shown(value: Any) -> str:
    return repr(value)[:80]
