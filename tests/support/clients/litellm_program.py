"""litellm: the same call for OpenAI's chat, completions and responses, and for Anthropic's messages."""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices otherwise

import litellm

url = sys.argv[1]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bonn"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": WEATHER}}]
NAMED = {"type": "function", "function": {"name": "weather"}}
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is the weather in Ulm?"}]
openai = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
anthropic = {"model": "anthropic/tiny", "api_base": url, "api_key": "none", "num_retries": 0}


def check(arguments):
    found = json.loads(arguments)
    assert found["city"] in ("Ulm", "Bonn"), found
    assert 0 <= found["days"] <= 9


for target in (openai, anthropic):
    reply = litellm.completion(messages=messages, max_tokens=8, **target)
    assert reply.usage.completion_tokens <= 8
    chunks = [*litellm.completion(messages=messages, max_tokens=8, stream=True, **target)]
    whole = litellm.stream_chunk_builder(chunks, messages=messages)
    assert whole.choices[0].finish_reason in ("length", "stop")
    call = litellm.completion(messages=messages, tools=TOOLS, tool_choice=NAMED, max_tokens=1000, **target)
    [first] = call.choices[0].message.tool_calls
    check(first.function.arguments)
    answered = [*messages, call.choices[0].message, {"role": "tool", "tool_call_id": first.id, "content": "rain"}]
    again = litellm.completion(messages=answered, tools=TOOLS, max_tokens=8, **target)
    assert again.choices[0].message.role == "assistant"
    streamed = [
        *litellm.completion(messages=messages, tools=TOOLS, tool_choice=NAMED, max_tokens=1000, stream=True, **target)
    ]
    built = litellm.stream_chunk_builder(streamed, messages=messages)
    check(built.choices[0].message.tool_calls[0].function.arguments)
    print(target["model"], first.function.arguments)

form = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": WEATHER}}
structured = litellm.completion(messages=messages, response_format=form, max_tokens=1000, **openai)
check(structured.choices[0].message.content)
completions = {**openai, "model": "text-completion-openai/tiny"}
text = litellm.text_completion(prompt="Once upon a time", max_tokens=8, **completions)
assert text.usage.completion_tokens <= 8
response = litellm.responses(input="Hello", max_output_tokens=16, **openai)
assert response.usage.output_tokens <= 16
reply = asyncio.run(litellm.acompletion(messages=messages, max_tokens=8, **openai))
assert reply.choices[0].message.role == "assistant"
print("litellm works")
