"""Mistral's tekken.json: a vocabulary by ranks, special tokens, and the version of the chat format."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.llm.errors import TokenizerError
from flambeau.llm.json_files import read_object
from flambeau.llm.text.gguf_splits import SplitRule
from flambeau.llm.text.ranked_vocabulary import ranked_tokenizer
from flambeau.llm.text.vocabulary import TokenizersVocabulary

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Files of versions 3 and 7 may leave out their special tokens, which are these.
FIRST_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
TOOLS = """
{%- macro show_tools() %}
    {%- if tools %}
        {{- '[AVAILABLE_TOOLS][' }}
        {%- for tool in tools %}
            {%- set own = tool.function %}
            {{- {'type': 'function', 'function': {'name': own.name, 'description': own.description or '',
                'parameters': own.parameters or {}}} | tojson }}
            {{- '' if loop.last else ', ' }}
        {%- endfor %}
        {{- '][/AVAILABLE_TOOLS]' }}
    {%- endif %}
{%- endmacro %}
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content %}{%- for part in content %}PART{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set users = namespace(first=none, last=none, system='', sounds=false) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set users.first = loop.index0 if users.first is none else users.first %}
        {%- set users.last = loop.index0 %}
        SOUNDS
    {%- elif message.role == 'system' %}
        {%- set users.system = users.system + ('\\n\\n' if users.system else '') + text_of(message.content) %}
    {%- endif %}
{%- endfor %}
{%- if users.sounds and users.system %}
    {{- raise_exception('the model takes no system message beside sounds; send the text in a message of the user') }}
{%- endif %}
{{- bos_token }}
"""
TEXT_PART = "{{- part.text }}"
# Of vocabularies with a token for sounds (Voxtral); texts beside each other are paragraphs, as in mistral-common.
ANY_PART = """
        {%- if part.type == 'audio' %}{{- '[AUDIO]' }}
        {%- else %}{{- ('\\n\\n' if loop.previtem and loop.previtem.type == 'text' else '') + part.text }}
        {%- endif %}
"""
FIND_SOUNDS = """
        {%- if message.content is not string %}
            {%- for part in message.content if part.type == 'audio' %}{%- set users.sounds = true %}{%- endfor %}
        {%- endif %}
"""
SYSTEM_IN_USER = """
    {%- if message.role == 'user' %}
        {%- if loop.index0 == users.last %}{{- show_tools() }}{%- endif %}
        {{- '[INST]' }}
        {%- if loop.index0 == users.last and users.system %}{{- users.system + '\\n\\n' }}{%- endif %}
        {{- text_of(message.content) + '[/INST]' }}
"""
SYSTEM_APART = """
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + text_of(message.content) + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}
        {%- if loop.index0 == users.PLACE %}{{- show_tools() }}{%- endif %}
        {{- '[INST]' + text_of(message.content) + '[/INST]' }}
"""
ASSISTANT = """
    {%- elif message.role == 'assistant' %}
        THOUGHT
        {{- text_of(message.content).rstrip(' ') }}
        {%- if message.tool_calls %}CALLS{%- endif %}
        {{- eos_token }}
"""
THOUGHT = """
        {%- if message.reasoning_content %}{{- '[THINK]' + message.reasoning_content + '[/THINK]' }}{%- endif %}
"""
ARGUMENTS = "(call.function.arguments if call.function.arguments is string else call.function.arguments | tojson)"
CALL_LIST = f"""
            {{{{- '[TOOL_CALLS][' }}}}
            {{%- for call in message.tool_calls %}}
                {{{{- '{{"name": ' + call.function.name | tojson + ', "arguments": ' + {ARGUMENTS} }}}}
                {{{{- (', "id": ' + call.id | tojson if call.id else '') + '}}' + ('' if loop.last else ', ') }}}}
            {{%- endfor %}}
            {{{{- ']' }}}}
"""
CALLS_WITH_IDS = f"""
            {{%- for call in message.tool_calls %}}
                {{{{- '[TOOL_CALLS]' + call.function.name + ('[CALL_ID]' + call.id if call.id else '') }}}}
                {{{{- '[ARGS]' + {ARGUMENTS} }}}}
            {{%- endfor %}}
"""
CALLS = f"""
            {{%- for call in message.tool_calls %}}
                {{{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + {ARGUMENTS} }}}}
            {{%- endfor %}}
"""
# What is JSON already stays so; other results are quoted.
RESULT_OBJECT = """
        {%- set result = text_of(message.content) %}
        {%- set is_json = result[:1] in ('{', '[') or result == result | int | string %}
        {{- '[TOOL_RESULTS]{"content": ' + (result if is_json else result | tojson) }}
        {{- ', "call_id": ' + message.tool_call_id | tojson + '}[/TOOL_RESULTS]' }}
"""
RESULT_WITH_ID = """
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + text_of(message.content) + '[/TOOL_RESULTS]' }}
"""
RESULT = """
        {{- '[TOOL_RESULTS]' + text_of(message.content) + '[/TOOL_RESULTS]' }}
"""
VERSIONS: Mapping[str, tuple[str, str, str]] = {  # the user's part, calls, results
    "v3": (SYSTEM_IN_USER, CALL_LIST, RESULT_OBJECT),
    "v7": (SYSTEM_APART.replace("PLACE", "last"), CALL_LIST, RESULT_WITH_ID),
    "v11": (SYSTEM_APART.replace("PLACE", "last"), CALLS_WITH_IDS, RESULT_WITH_ID),
    "v13": (SYSTEM_APART.replace("PLACE", "first"), CALLS, RESULT),
}


def read_tekken(file: Path) -> tuple[TokenizersVocabulary, dict[str, str]]:
    """The vocabulary of the file, and the chat template of its version; empty for a version that is not known."""
    document = read_object(file, TokenizerError)
    try:
        config = document["config"]
        num_special, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        words = sorted(document["vocab"], key=lambda word: int(word["rank"]))[: size - num_special]
        ranks = [base64.b64decode(word["token_bytes"], validate=True) for word in words]
        special = special_tokens(document, num_special)
        rule = SplitRule((str(config["pattern"]),), takes_words=True, begins=True)
        tokenizer = ranked_tokenizer(ranks, rule, special=special, first_id=num_special, plain={})
        from tokenizers import processors

        begin = NAMES["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], special_tokens=[(begin, special[begin])]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{file} is not a tekken.json ({error!r}); copy it again from the model's source"
        ) from None
    except ImportError as error:
        raise TokenizerError(f"{file} needs tokenizers: pip install flambeau[llm]") from error
    except TokenizerError as error:
        raise TokenizerError(f"{file} cannot be used: {error}; put the model's tokenizer.json there") from None
    names = {name: text for name, text in NAMES.items() if text in special}
    return TokenizersVocabulary(tokenizer, names), template_of(config.get("version"), special)


def special_tokens(document: Mapping[str, Any], count: int) -> dict[str, int]:
    """The special tokens by name; places without one are filled."""
    given = document.get("special_tokens")
    names = dict(enumerate(FIRST_TOKENS))
    if given is not None:
        names = {int(token["rank"]): str(token["token_str"]) for token in given}
    return {names.get(i, f"<SPECIAL_{i}>"): i for i in range(count)}


def template_of(version: Any, special: Mapping[str, int]) -> dict[str, str]:
    """The chat template of a version, which such folders do not have as a file."""
    if version not in VERSIONS:
        return {}
    user, calls, results = VERSIONS[version]
    thought = THOUGHT if "[THINK]" in special else ""
    assistant = ASSISTANT.replace("THOUGHT", thought).replace("CALLS", calls, 1)
    body = f"{user}{assistant}\n    {{%- elif message.role == 'tool' %}}{results}\n    {{%- endif %}}"
    part, sounds = (ANY_PART, FIND_SOUNDS) if "[AUDIO]" in special else (TEXT_PART, "")
    begin = TOOLS.replace("PART", part).replace("SOUNDS", sounds)
    return {"default": f"{begin}{{%- for message in messages %}}{body}\n{{%- endfor %}}"}
