"""OpenAI's paths in the API description."""

from __future__ import annotations

from flambeau.frontend.http.openapi import FLAG, OBJECT, TEXT, WHOLE, Operation, Schema

NUMBER: Schema = {"type": "number"}
TOKEN_IDS: Schema = {"type": "array", "items": WHOLE}
TEXTS: Schema = {"type": "array", "items": TEXT}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"type": "string", "nullable": True, "description": "The field that is the reason."},
                "code": {"type": "string", "nullable": True},
                "cause": {**TEXTS, "description": "How a worker died, for callers who may know."},
            },
        }
    },
}
STATUSES = (400, 401, 404, 408, 413, 429, 500, 503, 507)
MODEL: Schema = {"type": "string", "description": "A registered model: its name, or name@version."}
SAMPLING: dict[str, Schema] = {
    "model": MODEL,
    "max_tokens": WHOLE,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "n": WHOLE,
    "stop": {"oneOf": [TEXT, TEXTS]},
    "seed": WHOLE,
    "stream": {"type": "boolean", "description": "Answer with server-sent events."},
    "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
    "logit_bias": {"type": "object", "additionalProperties": NUMBER},
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "user": TEXT,
    "top_k": WHOLE,
    "min_p": NUMBER,
    "repetition_penalty": NUMBER,
    "min_tokens": WHOLE,
    "ignore_eos": FLAG,
    "stop_token_ids": TOKEN_IDS,
}
CHAT: Schema = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        **SAMPLING,
        "messages": {"type": "array", "items": OBJECT, "minItems": 1},
        "max_completion_tokens": WHOLE,
        "logprobs": FLAG,
        "top_logprobs": WHOLE,
        "response_format": OBJECT,
        "tools": {"type": "array", "items": OBJECT},
        "tool_choice": {"oneOf": [TEXT, OBJECT]},
        "chat_template_kwargs": OBJECT,
    },
}
COMPLETION: Schema = {
    "type": "object",
    "required": ["model", "prompt"],
    "properties": {
        **SAMPLING,
        "prompt": {"oneOf": [TEXT, TEXTS, TOKEN_IDS, {"type": "array", "items": TOKEN_IDS}]},
        "logprobs": WHOLE,
        "echo": FLAG,
        "best_of": WHOLE,
    },
}
EMBEDDING: Schema = {
    "type": "object",
    "required": ["model", "input"],
    "properties": {
        "model": MODEL,
        "input": {"oneOf": [TEXT, TEXTS]},
        "encoding_format": {"type": "string", "enum": ["float", "base64"]},
        "dimensions": WHOLE,
        "user": TEXT,
    },
}


def _operation(path: str, operation_id: str, summary: str, body: Schema) -> Operation:
    return Operation(
        path=path,
        method="post",
        id=operation_id,
        summary=summary,
        body={"application/json": body},
        problems=STATUSES,
        problem=ERROR,
    )


OPENAI = [
    _operation("/v1/chat/completions", "createChatCompletion", "Answer a chat (OpenAI).", CHAT),
    _operation("/v1/completions", "createCompletion", "Complete prompts (OpenAI).", COMPLETION),
    _operation("/v1/embeddings", "createEmbedding", "Embed texts (OpenAI).", EMBEDDING),
]
