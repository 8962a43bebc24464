"""FAMILIES: the supported families by the names of their classes in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.compressed import COMPRESSED
from flambeau.llm.models.families.config_parts import text_only
from flambeau.llm.models.families.decilm import DECILM
from flambeau.llm.models.families.dense_others import DENSE_OTHERS
from flambeau.llm.models.families.differing_layers import DIFFERING_LAYERS
from flambeau.llm.models.families.dots_note import DOTS_NOTE_ROWS
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.gemma import GEMMA
from flambeau.llm.models.families.gemma_3n import GEMMA_3N_ROWS
from flambeau.llm.models.families.gemma_4 import GEMMA_4
from flambeau.llm.models.families.gpt_like import GPT_LIKE
from flambeau.llm.models.families.granite_experts import GRANITE_EXPERTS
from flambeau.llm.models.families.hybrid import HYBRID
from flambeau.llm.models.families.hyper_latent import GLM_5_3, HYPER_LATENT
from flambeau.llm.models.families.image_readers import IMAGE_READERS, REFUSED, TEXT_SIZES, WHOLE_MODELS
from flambeau.llm.models.families.latent import LATENT
from flambeau.llm.models.families.layer_norm import LAYER_NORM
from flambeau.llm.models.families.llama_4 import LLAMA_4
from flambeau.llm.models.families.llama_like import LLAMA_LIKE
from flambeau.llm.models.families.minimax_3 import MINIMAX_3
from flambeau.llm.models.families.mistral_large_4 import MISTRAL_LARGE_4, MISTRAL_LARGE_4_TEXT
from flambeau.llm.models.families.modern_bert import MODERN_BERT
from flambeau.llm.models.families.older_gpt import OLDER_GPT
from flambeau.llm.models.families.qwen_vl import QWEN_VL
from flambeau.llm.models.families.shortcuts import LONGCAT
from flambeau.llm.models.families.sigmoid_experts import SIGMOID_EXPERTS
from flambeau.llm.models.families.softmax_experts import SOFTMAX_EXPERTS
from flambeau.llm.models.families.sound_readers import REFUSED as REFUSED_SOUNDS
from flambeau.llm.models.families.sound_readers import SOUND_READERS
from flambeau.llm.models.families.sparse_latent import SPARSE_LATENT
from flambeau.llm.models.families.text_decoders import TEXT_DECODERS
from flambeau.llm.models.families.vision_decoders import VISION_DECODERS

WITH_READERS = {
    name: Family(model_type=reader.model_type, text_section="text_config", sounds=reader)
    for name, reader in SOUND_READERS.items()
} | {
    name: Family(
        model_type=reader.model_type, text_section="text_config", images=reader, sounds=SOUND_READERS.get(name)
    )
    for name, reader in IMAGE_READERS.items()
}
WITH_READERS |= {name: WITH_READERS[part] for name, part in WHOLE_MODELS.items()}
TABLES = (
    LLAMA_LIKE,
    DENSE_OTHERS,
    DECILM,
    GEMMA,
    GEMMA_3N_ROWS,
    GEMMA_4,
    LAYER_NORM,
    MODERN_BERT,
    GPT_LIKE,
    OLDER_GPT,
    SOFTMAX_EXPERTS,
    SIGMOID_EXPERTS,
    GRANITE_EXPERTS,
    DIFFERING_LAYERS,
    MINIMAX_3,
    TEXT_DECODERS,
    LATENT,
    LONGCAT,
    SPARSE_LATENT,
    DOTS_NOTE_ROWS,
    HYPER_LATENT,
    COMPRESSED,
    MISTRAL_LARGE_4,
    LLAMA_4,
    HYBRID,
    QWEN_VL,
    WITH_READERS,
)
LLAMAS = ("internlm3", "iquestcoder")  # types whose class is Llama's in files of transformers, with other defaults
OLDER_TYPES = {"exaone4_5_text": "exaone4"}  # of language models in the first files of a family
FAMILIES: dict[str, Family] = {name: family for table in TABLES for name, family in table.items()}


def text_family(config: Config, found: Family) -> Family:
    """The family of the language model in a checkpoint with encoders, by the model_type of its own section."""
    reader = found.images or found.sounds
    section = config.get(found.text_section)
    named = section.get("model_type") if isinstance(section, Mapping) else None
    named = named or (reader.text_type if reader else None)
    if named is None or named in found.text_types:
        return found
    named = OLDER_TYPES.get(named, named)
    families = (*FAMILIES.values(), *VISION_DECODERS.values(), MISTRAL_LARGE_4_TEXT, GLM_5_3)
    base = next((f for f in families if f.model_type == named and not f.text_section), None)
    if base is None:
        raise CheckpointError(f"model_type {named!r} of {found.text_section} is not supported")
    text = replace(text_only(base), images=found.images, sounds=found.sounds)
    if reader is None:
        return text
    own = {} if found.sounds is None else found.sounds.text_sizes
    return replace(text, defaults={**TEXT_SIZES.get(named, {}), **base.defaults, **own})


def family_of(config: Config) -> Family:
    """The family named by `architectures`, else by `model_type`."""
    names, found = config.get("architectures"), None
    if names:
        names = [str(name) for name in names] if isinstance(names, list) else [str(names)]
        found = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if not names or (found is FAMILIES["LlamaForCausalLM"] and config.get("model_type") in LLAMAS):
        found = next((f for f in FAMILIES.values() if f.model_type == config.get("model_type")), None)
    if found is not None and found.text_section:
        found = text_family(config, found)
    if found is None:
        what = " and ".join(names) if names else f"model_type {config.get('model_type')!r}"
        for refused, kind in ((REFUSED, "images"), (REFUSED_SOUNDS, "sounds")):
            if reason := next((refused[name] for name in names or () if name in refused), ""):
                raise CheckpointError(f"{what} is not supported, because {reason}; use another model that reads {kind}")
        raise CheckpointError(f"{what} is not supported; supported are {', '.join(FAMILIES)}")
    return found
