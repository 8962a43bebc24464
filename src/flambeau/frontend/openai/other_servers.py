"""Fields of other servers that this one does not have: each is refused with what to send instead.

Where a value changes nothing there, it is accepted: many clients send the defaults of all fields.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.openai.fields import ANYTHING, FieldType

CHOOSE = "this server samples; send n above 1 and choose among the choices, or temperature 0 for the likeliest tokens"
NO_CODE = "this server runs no code of requests; send logit_bias, bad_words or allowed_token_ids"
FORM = "send structured_outputs, or response_format"
REPEATS = "send dry_multiplier, frequency_penalty or no_repeat_ngram_size"
SAMPLERS = "send temperature, top_k, top_p, min_p, typical_p, top_n_sigma or xtc_probability; their order is fixed"
CACHED = "prompts are cached by their blocks, without a choice of the request; cache_salt keeps one apart"
ALWAYS_APART = "reasoning is always returned apart from the answer"


@dataclass(frozen=True, slots=True)
class OtherField:
    """A field, what to send instead, and the values that change nothing."""

    remedy: str
    neutral: tuple[Any, ...] = ()

    @property
    def type(self) -> FieldType:
        def check(value: Any, place: str) -> None:
            if value not in self.neutral:
                raise InvalidField(place, f"{place} is not supported; {self.remedy}")

        return replace(ANYTHING, limits=check)


OTHER_FIELDS: dict[str, OtherField] = {
    # vLLM
    "use_beam_search": OtherField(CHOOSE, (False,)),
    "length_penalty": OtherField(CHOOSE, (1,)),
    "early_stopping": OtherField(CHOOSE, (False,)),
    "logits_processors": OtherField(NO_CODE, ([],)),
    "vllm_xargs": OtherField("send the fields by themselves", ({},)),
    "logprob_token_ids": OtherField("send logprobs with up to 20 alternatives", ([],)),
    "prompt_embeds": OtherField("send the prompt as text or token ids", ([],)),
    "chat_template": OtherField("the model's own is used; write the prompt yourself and send it to /v1/completions"),
    "truncation_side": OtherField("truncate_prompt_tokens keeps the end of the prompt", ("left",)),
    "request_id": OtherField("send the header x-request-id"),
    "include_reasoning": OtherField(ALWAYS_APART, (True,)),
    "mm_processor_kwargs": OtherField("the model's files say how images and videos are read", ({},)),
    "media_io_kwargs": OtherField("the model's files say how images and videos are read", ({},)),
    "kv_transfer_params": OtherField("prompts and texts are computed in one place here", ({},)),
    "repetition_detection": OtherField(REPEATS),
    # SGLang
    "regex": OtherField(FORM),
    "ebnf": OtherField(FORM),
    "structural_tag": OtherField(FORM),
    "no_stop_trim": OtherField("send include_stop_str_in_output", (False,)),
    "stop_regex": OtherField("send stop with texts", ([],)),
    "min_new_tokens": OtherField("send min_tokens", (0,)),
    "max_new_tokens": OtherField("send max_tokens"),
    "separate_reasoning": OtherField(ALWAYS_APART, (True,)),
    "stream_reasoning": OtherField("reasoning is always streamed", (True,)),
    "custom_logit_processor": OtherField(NO_CODE),
    "custom_params": OtherField(NO_CODE, ({},)),
    "lora_path": OtherField("send the adapter's name as the model"),
    "rid": OtherField("send the header x-request-id"),
    "return_hidden_states": OtherField("hidden states are not returned", (False,)),
    # llama.cpp's server and text-generation-webui
    "n_predict": OtherField("send max_tokens"),
    "repeat_penalty": OtherField("send repetition_penalty", (1,)),
    "repeat_last_n": OtherField("repetition_penalty reads the whole prompt and text"),
    "repetition_penalty_range": OtherField("repetition_penalty reads the whole prompt and text", (0,)),
    "json_schema": OtherField(FORM, ({},)),
    "grammar": OtherField(FORM, ("",)),
    "grammar_string": OtherField(FORM, ("",)),
    "samplers": OtherField(SAMPLERS),
    "typical": OtherField("send typical_p", (1,)),
    "tfs": OtherField(SAMPLERS, (1,)),
    "tfs_z": OtherField(SAMPLERS, (1,)),
    "top_a": OtherField(SAMPLERS, (0,)),
    "mirostat": OtherField(SAMPLERS, (0,)),
    "mirostat_mode": OtherField(SAMPLERS, (0,)),
    "mirostat_tau": OtherField("it has an effect with mirostat only, which this server has not", (5,)),
    "mirostat_eta": OtherField("it has an effect with mirostat only, which this server has not", (0.1,)),
    "dynatemp_range": OtherField("send temperature", (0,)),
    "dynatemp_exponent": OtherField("send temperature", (1,)),
    "dynamic_temperature": OtherField("send temperature", (False,)),
    "smoothing_factor": OtherField(SAMPLERS, (0,)),
    "n_probs": OtherField("send logprobs", (0,)),
    "min_keep": OtherField("at least one token is always kept", (0, 1)),
    "cache_prompt": OtherField(CACHED, (True,)),
    "id_slot": OtherField("sequences have no slots here", (-1,)),
    "n_keep": OtherField("a text is never shifted out of its context", (0, -1)),
    "t_max_predict_ms": OtherField("send max_tokens", (0,)),
    "ban_eos_token": OtherField("send ignore_eos", (False,)),
    "custom_token_bans": OtherField("send logit_bias with -100, or allowed_token_ids", ("",)),
    # transformers and text-generation-inference
    "num_beams": OtherField(CHOOSE, (1,)),
    "do_sample": OtherField("send temperature: 0 takes the best token"),
    "bad_words_ids": OtherField("send bad_words, or logit_bias with -100 for single tokens", ([],)),
    "suppress_tokens": OtherField("send logit_bias with -100", ([],)),
    "epsilon_cutoff": OtherField("send min_p", (0,)),
    "eta_cutoff": OtherField("send min_p or typical_p", (0,)),
    "penalty_alpha": OtherField("send temperature with top_k", (0,)),
    "encoder_repetition_penalty": OtherField("send repetition_penalty", (1,)),
    "guidance_scale": OtherField("say in the prompt what the text should not be", (1,)),
    "truncate": OtherField("send truncate_prompt_tokens"),
    "watermark": OtherField("texts are not marked", (False,)),
    "decoder_input_details": OtherField("send prompt_logprobs", (False,)),
    "top_n_tokens": OtherField("send logprobs"),
    "details": OtherField("send logprobs", (False,)),
    # other services
    "enable_thinking": OtherField('send chat_template_kwargs: {"enable_thinking": …}, or reasoning_effort'),
    "thinking_budget": OtherField("send max_reasoning_tokens"),
    "reasoning": OtherField("send reasoning_effort or max_reasoning_tokens"),
    "thinking": OtherField("send reasoning_effort or max_reasoning_tokens"),
}
