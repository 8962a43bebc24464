"""Architectures: from config.json as the families write it, and by gpt-fast's names."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flambeau.llm.checkpoints.checkpoint import unsupported_reason
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture, RopeScaling
from flambeau.llm.models.hugging_face import from_hugging_face, read_hugging_face
from flambeau.llm.models.presets import PRESETS, from_meta, preset

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
}


def llama(**options):
    return from_hugging_face({**LLAMA, **options})


def family(name, **options):
    return from_hugging_face({**LLAMA, "architectures": [name], **options})


def test_a_llama_is_read():
    arch = llama(rope_theta=500000.0, eos_token_id=[7, 8], tie_word_embeddings=True, rms_norm_eps=1e-5)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_size, arch.num_layers) == (32, 4, 64, 4)
    assert (arch.rope_theta, arch.eos_ids, arch.tied_embeddings) == (500000.0, (7, 8), True)
    assert (arch.norm_epsilon, arch.dtype, arch.windows) == (1e-5, "bfloat16", ())
    assert (arch.qkv_bias, arch.output_bias, arch.mlp_bias, arch.qk_norm) == (False, False, False, False)


def test_all_heads_have_their_own_keys_where_nothing_else_is_said():
    assert llama(num_key_value_heads=None).num_kv_heads == 32


def test_the_model_type_is_enough():
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert from_hugging_face({**config, "model_type": "qwen2"}).qkv_bias


def test_both_spellings_of_rotary_parameters_are_read():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    older = llama(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    oldest = llama(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    newer = llama(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert older == oldest == newer
    assert newer.rope_scaling == RopeScaling(kind="llama3", factor=8.0, original_length=8192)
    assert newer.rope_theta == 5e5


def test_yarn_makes_the_context_longer_by_its_factor():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert llama(max_position_embeddings=32768, rope_scaling=scaling).max_length == 131072
    assert llama(max_position_embeddings=40960, rope_scaling=scaling).max_length == 131072
    without_factor = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
    assert llama(max_position_embeddings=16384, rope_parameters=without_factor).rope_scaling.factor == 4.0


def test_biases_are_where_each_family_has_them():
    assert llama(attention_bias=True).output_bias
    assert llama(mlp_bias=True).mlp_bias
    qwen2, qwen3 = family("Qwen2ForCausalLM"), family("Qwen3ForCausalLM")
    assert qwen2.qkv_bias
    assert not qwen2.output_bias
    assert not qwen3.qkv_bias
    assert qwen3.qk_norm
    assert qwen3.head_size == 128  # which its config.json may leave out


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("MistralForCausalLM", {"max_position_embeddings": 4096}, ()),  # never reached
        ("LlamaForCausalLM", {"sliding_window": 16, "use_sliding_window": True}, ()),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 2}, ()),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": True}, ()),  # from layer 28 on
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 16),
        ),
        ("Qwen3ForCausalLM", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, (16,) * 4),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 16, None, 16),
        ),
    ],
)
def test_windows_are_for_the_layers_each_family_means(name, options, expected):
    assert family(name, **options).windows == expected


def test_smol_lm_3_does_not_rotate_every_fourth_layer():
    assert family("SmolLM3ForCausalLM").unrotated_layers == {3}
    assert family("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0]).unrotated_layers == {0, 3}


def test_experts_are_counted_in_both_spellings():
    mixtral = family("MixtralForCausalLM")
    assert (mixtral.num_experts, mixtral.num_experts_per_token, mixtral.expert_size) == (8, 2, 5632)
    assert mixtral.normalizes_experts
    qwen = family("Qwen3MoeForCausalLM", num_experts=60, moe_intermediate_size=512, decoder_sparse_step=2)
    assert (qwen.num_experts, qwen.num_experts_per_token, qwen.expert_size) == (60, 8, 512)
    assert not qwen.normalizes_experts
    assert [qwen.has_experts(layer) for layer in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architectures": ["CTRLLMHeadModel"]}, ["CTRLLMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None, "model_type": "bert"}, ["'bert'", "MistralForCausalLM"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
        ({"architectures": [3]}, ["3 is not supported"]),
        ({"architectures": "BertModel"}, ["BertModel is not supported"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'", "must be an object"]),
        ({"quantization_config": "gptq"}, ["quantization_config", "'gptq'", "must be an object"]),
        ({"hidden_act": "selu"}, ["hidden_act", "'selu'"]),
        ({"alibi": True}, ["alibi"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, ["'ntk'", "llama3", "yarn"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, ["short_factor", "32 numbers"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters", "layers"]),
        ({"quantization_config": {"quant_method": "quip"}}, ["'quip'", "flambeau llm quantize"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_hidden_layers": "many"}, ["num_hidden_layers", "'many'"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "finite", "nan"]),
        ({"rope_theta": float("inf")}, ["rope_theta", "finite", "inf"]),
        ({"num_key_value_heads": 5}, ["32 heads", "5 key-value heads"]),
        ({"head_dim": 33}, ["33", "even"]),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["linear_attention"] * 4,
            },
            ["layer_types", "sliding_attention"],
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, words):
    with pytest.raises(CheckpointError) as refused:
        llama(**options)
    assert [word for word in words if word not in str(refused.value)] == []


def test_weights_that_we_quantized_are_not_refused():
    arch = llama(quantization_config={"quant_method": "flambeau", "bits": 4})
    assert arch.source["quantization_config"]["bits"] == 4


def test_generation_config_may_know_more_ends(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 9]}))
    assert read_hugging_face(tmp_path).eos_ids == (2, 5, 9)


def test_a_config_that_is_no_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        read_hugging_face(tmp_path)
    assert unsupported_reason(tmp_path) is None  # transformers could not read it either
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json must hold an object"):
        read_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "attention_multiplier": float("nan")}))
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON: it has NaN"):
        read_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "time_step_limit": [0.0, float("inf")]}))
    assert read_hugging_face(tmp_path).num_layers == 4


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Llama-2-7b-chat-hf", "Llama-2-7B"),
        ("llama-7B", "7B"),
        ("Meta-Llama-3-8B", "Llama-3-8B"),
        ("Meta-Llama-3-70B-Instruct", "Llama-3-70B"),
        ("Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("Mistral-7B-v0.1", "Mistral-7B"),
        ("Mistral-7B-Instruct-v0.2", "Mistral-7B-Instruct-v0.2"),
        ("Mixtral-8x7B-v0.1", "Mixtral-8x7B"),
        ("Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("CodeLlama-7b-Python-hf", "CodeLlama-7b-Python-hf"),
        ("CodeLlama-34b-Python-hf", "CodeLlama-34B"),
        ("stories15M", "stories15M"),
        ("stories110M", "stories110M"),
    ],
)
def test_the_longest_preset_in_a_folder_name_is_meant(folder, name):
    assert preset(folder) is PRESETS[name]


def test_presets_have_the_shapes_of_their_models():
    llama2, llama31, mixtral = preset("Llama-2-7b-hf"), preset("Meta-Llama-3.1-8B"), preset("Mixtral-8x7B-v0.1")
    assert (llama2.intermediate_size, llama2.head_size, llama2.vocab_size) == (11008, 128, 32000)
    assert (llama31.intermediate_size, llama31.num_kv_heads, llama31.vocab_size) == (14336, 8, 128256)
    assert llama31.rope_scaling == RopeScaling(kind="llama3", factor=8.0, original_length=8192)
    assert (mixtral.num_experts, mixtral.expert_size, mixtral.num_kv_heads) == (8, 14336, 8)
    assert preset("13B").intermediate_size == 13824
    assert preset("stories15M").intermediate_size == 768


def test_a_name_nobody_knows_says_what_to_do():
    with pytest.raises(CheckpointError, match=r"'my-model' has no config\.json and no known name.*stories15M"):
        preset("my-model")


def test_metas_own_parameters_are_read():
    params = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024}
    params |= {"ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True}
    arch = from_meta(params, vocab_size=0)
    expected = preset("Meta-Llama-3.1-8B")
    assert arch == expected
    assert from_meta({**params, "vocab_size": -1}, vocab_size=128256) == expected


def test_metas_small_llamas_scale_their_positions_more():
    params = {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 256}
    params |= {"ffn_dim_multiplier": 1.5, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True}
    assert replace(from_meta(params, vocab_size=0), tied_embeddings=True) == preset("Llama-3.2-1B")
    assert preset("Llama-3.2-1B").rope_scaling.factor == 32


# ---- options that would be ignored silently ----


def test_theta_that_only_the_replaced_parameters_have_is_asked_for():
    parameters = {"rope_type": "default", "rope_theta": 1e6}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    with pytest.raises(CheckpointError, match="Copy rope_theta into rope_scaling"):
        llama(rope_parameters=parameters, rope_scaling=yarn)
    complete = llama(rope_parameters=parameters, rope_scaling={**yarn, "rope_theta": 1e6})
    assert complete.rope_theta == 1e6
    assert complete.rope_scaling.kind == "yarn"
    assert llama(rope_parameters=parameters, rope_scaling=yarn, rope_theta=1e6) == complete


def test_length_outside_of_the_rope_parameters_is_not_ignored():
    yarn = {"type": "yarn", "factor": 4.0}
    with pytest.raises(CheckpointError, match="original_max_position_embeddings is 1024 outside"):
        llama(rope_scaling=yarn, original_max_position_embeddings=1024)
    same = llama(rope_scaling={**yarn, "original_max_position_embeddings": 512}, original_max_position_embeddings=512)
    assert same.rope_scaling.original_length == 512


def test_attention_to_later_tokens_is_not_supported():
    with pytest.raises(CheckpointError, match="is_causal False is not supported"):
        llama(is_causal=False)
    assert llama(is_causal=True) == llama()


def test_layers_with_a_window_are_named_or_all():
    types = ["full_attention", "sliding_attention"] * 2
    assert family("MistralForCausalLM", layer_types=types).windows == (None, 4096, None, 4096)
    with pytest.raises(CheckpointError, match="layer_types are not supported for mixtral"):
        family("MixtralForCausalLM", layer_types=types, sliding_window=16)


def test_keys_that_may_have_an_effect_and_are_not_known_are_listed():
    assert llama(use_cache=True, attention_dropout=0.1, pretraining_tp=2, head_dim=None).unknown_keys == ()
    assert llama(attn_temperature=2.0, sliding_window=64, gates=[]).unknown_keys == (
        "attn_temperature",
        "sliding_window",
    )
    assert family("MistralForCausalLM", sliding_window=64).unknown_keys == ()
    rope = {"rope_type": "linear", "factor": 2.0, "bend": 3}
    assert llama(rope_parameters=rope).unknown_keys == ("rope_parameters.bend",)


@pytest.mark.parametrize(("key", "value"), [("rope_interleaved", True), ("lm_head_bias", True), ("use_mrope", True)])
def test_keys_that_are_known_to_change_the_result_are_refused(key, value):
    with pytest.raises(CheckpointError, match=key):
        llama(**{key: value})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("DeepseekV2ForCausalLM", "norm_topk_prob", True),
        ("DeepseekV2ForCausalLM", "scoring_func", "sigmoid"),
        ("DeepseekV2ForCausalLM", "topk_method", "noaux_tc"),
        ("DeepseekV3ForCausalLM", "topk_method", "greedy"),
        ("DeepseekV3ForCausalLM", "moe_layer_freq", 2),
        ("DeepseekV3ForCausalLM", "num_key_value_heads", 4),
        ("DeepseekV3ForCausalLM", "index_topk", 2048),
    ],
)
def test_what_a_family_of_latent_attention_does_not_support_is_refused_by_name(name, key, value):
    config = {**LLAMA, "num_key_value_heads": 32, "num_experts_per_tok": 8, "architectures": [name]}
    assert from_hugging_face(config).latent_size == 512
    with pytest.raises(CheckpointError, match=key):
        from_hugging_face({**config, key: value})


def test_what_is_cached_of_deepseek_v3_is_a_latent_and_a_rotated_key():
    arch = from_hugging_face({**LLAMA, "num_key_value_heads": 32, "architectures": ["DeepseekV3ForCausalLM"]})
    assert (arch.num_kv_heads, arch.head_size) == (1, 512 + 64)
    assert (arch.query_latent_size, arch.unrotated_size, arch.rotary_size, arch.output_size) == (1536, 128, 64, 128)


def test_attention_span_is_where_attention_takes_as_long_as_the_rest():
    shape = {"hidden_size": 256, "num_heads": 8, "num_kv_heads": 2, "head_size": 32, "intermediate_size": 640}
    arch = Architecture(vocab_size=100, num_layers=4, **shape)
    assert arch.attention_span == 640
    assert replace(arch, windows=(16, None, 16, None)).attention_span == 1280
    assert replace(arch, windows=(16,) * 4).attention_span is None
