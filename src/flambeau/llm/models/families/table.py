"""FAMILIES: the supported families by the names of their classes in transformers."""

from __future__ import annotations

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.experts import EXPERTS
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.gemma import GEMMA
from flambeau.llm.models.families.gpt_like import GPT_LIKE
from flambeau.llm.models.families.latent import LATENT
from flambeau.llm.models.families.layer_norm import LAYER_NORM
from flambeau.llm.models.families.llama_4 import LLAMA_4
from flambeau.llm.models.families.llama_like import LLAMA_LIKE

FAMILIES = {**LLAMA_LIKE, **GEMMA, **LAYER_NORM, **GPT_LIKE, **EXPERTS, **LATENT, **LLAMA_4}


def family_of(config: Config) -> Family:
    """The family named by `architectures`, else by `model_type`."""
    names = config.get("architectures")
    if names:
        names = [str(name) for name in names] if isinstance(names, list) else [str(names)]
        found = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    else:
        found = next((f for f in FAMILIES.values() if f.model_type == config.get("model_type")), None)
    if found is None:
        what = " and ".join(names) if names else f"model_type {config.get('model_type')!r}"
        raise CheckpointError(f"{what} is not supported; supported are {', '.join(FAMILIES)}")
    return found
