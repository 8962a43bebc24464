"""Which keys of config.json have been read, and which are left that may change what a model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Keys without an effect on the logits: names, versions, training, and outputs that are not used here.
_HARMLESS = """
_name_or_path architectures model_type auto_map transformers_version transformers.js_config tokenizer_class
torch_dtype dtype _attn_implementation _attn_implementation_autoset attn_implementation unsloth_fixed
_from_model_config unsloth_version unsloth_traced_with model_max_length is_llama_config name_or_path _commit_hash
license _model_name_or_path
attention_dropout attention_probs_dropout_prob attn_pdrop attn_dropout resid_pdrop embd_pdrop emb_pdrop
embedding_dropout residual_dropout hidden_dropout hidden_dropout_prob dropout activation_dropout
classifier_dropout layerdrop initializer_range initializer_factor init_std initializer_cutoff_factor
gradient_checkpointing output_router_logits router_aux_loss_coef router_z_loss_coef router_jitter_noise
input_jitter_noise aux_loss_alpha seq_aux ep_size pretraining_tp use_cache use_flash_attn full_attn_mod
interpolate_factor return_dict output_attentions output_hidden_states torchscript id2label label2id num_labels
problem_type finetuning_task task_specific_params pad_token_id sep_token_id unk_token_id
decoder_start_token_id is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size
tie_encoder_decoder chunk_size_feed_forward use_bfloat16 pruned_heads tf_legacy_loss prefix summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
cache_implementation max_sequence_length output_past n_special predict_special_tokens _num_labels output_dropout
"""
HARMLESS = frozenset(_HARMLESS.split())
DUAL_CHUNKS = "dual_chunk_attention_config"
WINDOW_KEYS = frozenset(
    {
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "sliding_window_pattern",
        "_sliding_window_pattern",
    }
)
ROPE_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "partial_rotary_factor",
        "short_factor",
        "long_factor",
        "finetuned",
    }
)


class RecordedConfig(Mapping[str, Any]):
    """config.json with its defaults; records the keys that are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def unknown_keys(given: Mapping[str, Any], understood: frozenset[str]) -> tuple[str, ...]:
    """The keys that may have an effect and were not understood; those without a value have none."""
    unknown = [key for key, value in given.items() if key not in understood and value not in (None, "", [], {})]
    for section in ("rope_parameters", "rope_scaling"):
        nested = given.get(section)
        if isinstance(nested, Mapping):
            # A section may hold one section for each type of layer.
            groups = {f"{section}.{key}": value for key, value in nested.items() if isinstance(value, Mapping)}
            groups = groups or {section: nested}
            unknown += [
                f"{name}.{key}" for name, group in groups.items() for key in group if key not in ROPE_KEYS | understood
            ]
    return tuple(unknown)
