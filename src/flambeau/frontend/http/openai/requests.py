"""What clients may ask for, field by field; a field that is not here is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, json

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CountOrNone = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Text = Annotated[str, Meta(min_length=1)]
Object = dict[str, Any]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """How a stream is made."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; without effect


class Request(Struct, kw_only=True):
    """Which model is meant, and what all endpoints take without effect."""

    model: str | None = None
    user: Any = None


class Sampling(Request, kw_only=True):
    """What chat and completions share: how the text is sampled, and how it is sent."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Choices | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=16)] | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # ---- beyond OpenAI's API ----
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # 0 and -1: all
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_tokens: CountOrNone | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    # ---- without effect ----
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class ChatRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: list[Object]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    response_format: Object | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None  # a variable of the chat template
    chat_template_kwargs: Object | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Any = None
    prediction: Any = None  # a hint at the answer; what it would save, speculation saves
    functions: Any = None  # refused, as are the next ones
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Alternatives | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class EmbeddingRequest(Request, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None


chat_decoder = json.Decoder(ChatRequest)
completion_decoder = json.Decoder(CompletionRequest)
embedding_decoder = json.Decoder(EmbeddingRequest)
