"""GrammarCompiler: the form that a request asks for → a grammar over the model's tokens; the last ones are kept."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flambeau.llm.chat.chat_format import ChatTurn
from flambeau.llm.chat.grammar_writer import NO_PARAMETERS, ToolRule
from flambeau.llm.chat.tool_grammar import ReplyForm, write_grammar
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.grammar.matcher import GrammarMatcher
from flambeau.llm.grammar.normalized_schema import normalize
from flambeau.llm.grammar.schema import check_schema, locate_fault, parse_schema, refusal, types_of
from flambeau.llm.sampling_params import STRUCTURES
from flambeau.llm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMARS = 64
PARAMETER = "structured_outputs"
IN_GRAMMAR = re.compile(r"\s*\d+ \||\s*\^\s*$|<non-verbose/>")  # a line of the grammar, and a mark under it
REMEDIES = {
    "oneOf constraints are not supported": "the parts of oneOf may overlap, which cannot be excluded; use anyOf",
    "NoExtensionBias": "no text fits it",
}
# In a grammar: a text, a comment, a regular expression, or the beginning of a JSON schema.
IN_LARK = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/|(%json\s*)')
UNKNOWN_KEYS, NO_BRACKETS = "Unimplemented keys: ", str.maketrans("", "", '[]"')
IN_SCHEMA = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")

# Bounds of a compilation and of a step, in llguidance's units: about 50,000 lexer fuel, 14,000 step fuel and 20,000
# items take a millisecond; a lexer state has 1 to 2 kB.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar at its beginning; each sequence gets a matcher of its own."""

    start: LLMatcher
    eos_ids: Collection[int]
    vocab_size: int

    def matcher(self, *, ignore_eos: bool) -> GrammarMatcher:
        return GrammarMatcher(self.start.deep_copy(), self.eos_ids, self.vocab_size, ignore_eos=ignore_eos)


# Between the parts of JSON: a few spaces, or a line break and an indentation. Small models would go on for ever.
WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
# Letters behind a backslash. Without u every text has one spelling: a name could be written a second time by another.
ESCAPES = 'nrbtf\\"'


class GrammarCompiler:
    """Compiles for one vocabulary. The tables of the vocabulary are made with the first grammar."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        self._vocabulary: LLTokenizer | None = None
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._keeping = threading.Lock()  # of `_grammars`: requests are also prepared in another thread

    def has_compiled(self, turn: ChatTurn | None, structure: Mapping[str, Any] | None) -> bool:
        """Whether the grammar of a reply is kept, or not needed."""
        key = key_of(turn, structure)
        return key is None or key in self._grammars

    def compile(self, structure: Mapping[str, Any]) -> Grammar:
        """Raises InvalidRequest for a form that cannot be enforced."""
        return self._keep(json.dumps(structure), lambda: self._compile(structure))

    def _keep(self, key: str, compile_: Callable[[], LLMatcher]) -> Grammar:
        if (kept := self._grammars.get(key)) is None:
            kept = Grammar(compile_(), self._eos_ids, self._vocab_size)
        with self._keeping:
            self._grammars[key] = kept
            self._grammars.move_to_end(key)
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return kept

    def _compile(self, structure: Mapping[str, Any]) -> LLMatcher:
        self._vocabulary_tables()
        form = form_of(structure)
        is_schema = form in ("json", "json_object")
        schema = read_schema(structure) if is_schema else None
        text = f"start: {json_expression(schema, structure)}" if is_schema else to_lark(form, structure[form])
        matcher = self._match(text)
        if not matcher.is_error():
            return matcher
        if not is_schema:
            raise InvalidRequest(f"the {form} cannot be enforced: {short(matcher.get_error())}", PARAMETER)
        raise schema_fault(schema, structure) or refusal("", short(matcher.get_error()))

    def _match(self, lark: str) -> LLMatcher:
        vocabulary = self._vocabulary_tables()
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(vocabulary, grammar_of(lark), log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds what is too complex for a step, and warms up the lexer
        return matcher

    def compile_reply(self, turn: ChatTurn, structure: Mapping[str, Any] | None) -> Grammar | None:
        """The grammar of a reply in a chat: reasoning is free, calls and the answer have their form. None: all is free.

        Raises InvalidRequest for a form, or a strict tool, that cannot be enforced.
        """
        if (key := key_of(turn, structure)) is None:
            return None
        if has_answer_only(turn):
            return self._keep(key, lambda: self._compile(structure or {}))
        return self._keep(key, lambda: self._compile_reply(turn, structure))

    def _compile_reply(self, turn: ChatTurn, structure: Mapping[str, Any] | None) -> LLMatcher:
        self._vocabulary_tables()
        form = ReplyForm(
            notation=turn.format.tools.name,
            tools=[read_tool(tool) for tool in turn.tools],
            must_call=turn.must_call,
            is_parallel=turn.is_parallel,
            answer=self._answer(structure) if structure is not None else None,
            may_think=turn.may_think,
            thought=turn.format.thought,
            starts_in_thought=turn.starts_in_thought,
        )
        lark = write_grammar(form, turn.format.special, lambda schema: json_expression(schema, {}))
        matcher = self._match(lark)
        if matcher.is_error():
            raise InvalidRequest(f"the reply's form cannot be enforced: {short(matcher.get_error())}", "tools")
        return matcher

    def _answer(self, structure: Mapping[str, Any]) -> str:
        """The expression of a structured answer."""
        self.compile(structure)  # its errors name the part at fault
        form = form_of(structure)
        if form in ("json", "json_object"):
            return json_expression(read_schema(structure), structure)
        return f"%lark {{\n{to_lark(form, structure[form])}\n}}"

    def _vocabulary_tables(self) -> LLTokenizer:
        if self._vocabulary is None:
            if self._tokenizer is None or not self._tokenizer.has_bytes or not self._eos_ids:
                raise InvalidRequest(
                    "structured output needs a tokenizer whose tokens have bytes of their own and an end token, which "
                    "this model lacks; ask for the form in the prompt",
                    PARAMETER,
                )
            try:
                from llguidance import LLTokenizer
            except ImportError:
                raise InvalidRequest(
                    "structured output needs llguidance: pip install 'flambeau[llm]'", PARAMETER
                ) from None
            tokens = VocabularyBytes(self._tokenizer, self._vocab_size, self._eos_ids)
            self._vocabulary = LLTokenizer(tokens, eos_token=[*self._eos_ids])  # type: ignore[arg-type]
        return self._vocabulary


def key_of(turn: ChatTurn | None, structure: Mapping[str, Any] | None) -> str | None:
    """What a reply's grammar depends on; None: the reply is free."""
    if turn is None or has_answer_only(turn):
        return json.dumps(structure) if structure else None
    if not turn.has_grammar and structure is None:
        return None
    calls = [turn.format.tools.name, [*turn.tools], turn.must_call, turn.is_parallel]
    return json.dumps([structure, *calls, turn.starts_in_thought, turn.may_think])


def has_answer_only(turn: ChatTurn) -> bool:
    """Whether a reply is neither preceded by thoughts nor made of calls."""
    return not (turn.has_grammar or turn.tools or turn.may_think or turn.format.tools.has_channels)


class VocabularyBytes:
    """The bytes of all tokens as llguidance reads them. Tokens without bytes are never allowed, except the end."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        num_text = min(vocab_size, tokenizer.vocab_size)
        hidden = {*eos_ids, tokenizer.unk_id, tokenizer.pad_id, tokenizer.bos_id}
        self.tokens = [b"" if i >= num_text or i in hidden else tokenizer.visible_bytes(i) for i in range(vocab_size)]
        special = {i for i in tokenizer.special_ids.values() if i < num_text} - hidden
        for token in special:  # only a grammar that names them allows them
            self.tokens[token] = tokenizer.token_bytes(token)
        for token in eos_ids:
            self.tokens[token] = b"<end %d>" % token
        self.special_token_ids = [*eos_ids, *special]
        self.eos_token_id = min(eos_ids)

    def __call__(self, text: bytes | str) -> Sequence[int]:
        """Not used: grammars do not cut texts into tokens."""
        return []


def read_schema(structure: Mapping[str, Any]) -> Any:
    schema = structure.get("json")
    if schema is None:
        return {"type": "object"}
    if isinstance(schema, str):
        schema = parse_schema(schema)
    check_schema(schema)
    return schema


def form_of(structure: Mapping[str, Any]) -> str:
    return next(name for name in STRUCTURES if structure.get(name) is not None)


def schema_fault(schema: Any, structure: Mapping[str, Any]) -> InvalidRequest | None:
    """Why a schema cannot be enforced; None if it can."""
    from llguidance import LLMatcher

    def error_of(part: Any) -> str:
        return short(LLMatcher.validate_grammar(grammar_of(f"start: {json_expression(part, structure)}")))

    if not (message := error_of(schema)):
        return None
    return refusal(locate_fault(schema, message, error_of) if isinstance(schema, dict) else "", message)


def read_tool(tool: Mapping[str, Any]) -> ToolRule:
    """A tool with the schema that its arguments must have: its own, or any object where that cannot be enforced.

    Raises InvalidRequest if the tool is strict and its schema cannot be enforced.
    """
    function = tool["function"]
    name, is_strict = function["name"], function.get("strict") is True
    schema = function.get("parameters") or NO_PARAMETERS
    try:
        check_schema(schema)
        fault = schema_fault(schema, {})
        if fault is None and types_of(schema) not in (None, {"object"}):
            fault = refusal("/type", "the arguments of a call are an object")
    except InvalidRequest as error:
        fault = error
    if fault is None:
        return ToolRule(name, {"type": "object", **schema}, is_strict)
    if is_strict:
        raise InvalidRequest(f"the parameters of the tool {name!r}: {fault}", "tools")
    return ToolRule(name, {"type": "object"}, is_strict)


def json_expression(schema: Any, structure: Mapping[str, Any]) -> str:
    """A checked schema as an expression of a grammar."""
    if isinstance(schema, dict):
        is_compact = structure.get("disable_any_whitespace")
        options = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": WHITESPACE}
        schema = {**normalize(schema), "x-guidance": {**options, "json_allowed_escapes": ESCAPES}}
    return f"%json {json.dumps(schema)}"


def to_lark(form: str, content: Any) -> str:
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    if form == "choice":
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in content)
    if form == "regex":
        return f"start: /{regex_to_lark(content, use_ascii='d')}/"  # \d is 0 to 9, as most people mean it
    if "%llguidance" in content:
        raise InvalidRequest("the grammar cannot have %llguidance: its options are the server's own", PARAMETER)
    try:
        return with_checked_schemas(any_to_lark(content))
    except InvalidRequest:
        raise
    except Exception as error:  # the converter of llama.cpp's notation raises several kinds
        raise InvalidRequest(f"the grammar cannot be read: {short(str(error))}", PARAMETER) from None


def with_checked_schemas(lark: str) -> str:
    """A grammar whose JSON schemas are held like those of other requests."""
    written: list[str] = []
    place = 0
    while (found := IN_LARK.search(lark, place)) is not None:
        written.append(lark[place : found.start()])
        place = found.end()
        if found[1] is None:
            written.append(found[0])
            continue
        schema, place = json.JSONDecoder().raw_decode(lark, place)
        check_schema(schema)
        written.append(json_expression(schema, {}))
    return "".join([*written, lark[place:]])


def grammar_of(lark: str) -> str:
    """A grammar that leaves it to the model how a text is cut into tokens, also where only one text may follow."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + lark)


def short(message: str) -> str:
    """The part of llguidance's message that is about the request, without the place in our own grammar."""
    lines = [line.strip() for line in message.strip().splitlines() if not IN_GRAMMAR.match(line)]
    told = " ".join(IN_SCHEMA.sub("", line) for line in lines if line)[:300]
    if told.startswith(UNKNOWN_KEYS):
        return f"{told.removeprefix(UNKNOWN_KEYS).translate(NO_BRACKETS)} cannot be enforced; leave it out"
    return next((remedy for start, remedy in REMEDIES.items() if told.startswith(start)), told)
