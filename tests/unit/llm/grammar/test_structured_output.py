"""What a grammar asks for holds, whatever the network would write, and the network's distribution stays its own."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections import Counter
from dataclasses import replace

import jsonschema
import pytest
import torch

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.sampling_params import SamplingParams
from support.async_backend import AsyncEagerBackend
from support.statistics import chi_square_p
from support.structured_output import (
    DIGIT,
    PROMPT,
    REFUSED,
    SCHEMAS,
    SPECULATIONS,
    WORD,
    model,
    obj,
    structured_engine,
    tokenizer,
)
from support.tiny_models import tiny_engine

DRAWS = 12  # of each schema; scripts may ask for more
PERSON = obj(name=WORD, age=DIGIT, tags={"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3})
# An untrained network seldom ends a text that may have any length; a bias helps it.
CLOSING = {tokenizer().encode(text, add_special=False)[0]: 8.0 for text in '"}]'}
QUOTE = {tokenizer().encode('"', add_special=False)[0]: 8.0}
UNBOUNDED = ("min properties", "additional properties", "required without properties")


@pytest.fixture(scope="module")
def engine():
    return structured_engine(max_num_seqs=32)


@pytest.fixture(scope="module", params=SPECULATIONS)
def any_engine(request):
    return structured_engine(max_num_seqs=32, **SPECULATIONS[request.param])


def check(completion, schema) -> None:
    assert completion.finish_reason == "stop", (completion.text, completion.error)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(completion.text))


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_untrained_network_writes_what_the_schema_allows(engine, name):
    form = {"json": SCHEMAS[name], "disable_any_whitespace": True}
    bias = QUOTE if name in UNBOUNDED else {}
    for completion in engine.generate(PROMPT, structured_outputs=form, n=DRAWS, max_tokens=1500, logit_bias=bias):
        check(completion, SCHEMAS[name])


def test_space_between_the_parts_is_bounded(engine):
    """An untrained network would write blanks without end: they are as likely as anything else."""
    for completion in engine.generate(PROMPT, structured_outputs={"json": PERSON}, n=DRAWS, max_tokens=1500):
        check(completion, PERSON)
        assert not re.search(r"\n[ \t]*\r?\n|[ \t]{41}", re.sub(r'"[^"]*"', "0", completion.text))


def test_any_object_is_an_object(engine):
    form = {"json_object": True, "disable_any_whitespace": True}
    for completion in engine.generate(PROMPT, structured_outputs=form, n=8, max_tokens=2000, logit_bias=CLOSING):
        assert isinstance(json.loads(completion.text), dict)


@pytest.mark.parametrize(("schema", "pointer"), REFUSED)
def test_what_cannot_be_enforced_is_refused_by_its_pointer(engine, schema, pointer):
    with pytest.raises(InvalidRequest, match="cannot be enforced at") as told:
        engine.generate(PROMPT, structured_outputs={"json": json.dumps(schema)})
    assert f" at {pointer}: " in str(told.value)
    assert told.value.parameter == "structured_outputs"
    assert not engine.has_work


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "a{"}, "regex"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": 'start: "a"\n%llguidance {"no_forcing": false}'}, "%llguidance"),
        ({"json": "{"}, "no valid JSON"),
    ],
)
def test_other_forms_are_refused_with_the_reason(engine, form, told):
    with pytest.raises(InvalidRequest, match=told):
        engine.generate(PROMPT, structured_outputs=form)


def test_regex_choice_and_grammar(any_engine):
    def texts(**form):
        found = any_engine.generate(PROMPT, structured_outputs=form, n=8, max_tokens=200)
        assert {completion.finish_reason for completion in found} == {"stop"}
        return [completion.text for completion in found]

    assert all(re.fullmatch(r"[0-9]{3}-[a-c]{1,5}x/y", text) for text in texts(regex=r"\d{3}-[a-c]{1,5}x/y"))
    assert {*texts(choice=["yes", "no", 'may"be'])} <= {"yes", "no", 'may"be'}
    assert {*texts(grammar='start: "a" b "c"\nb: "b" | "b" "b" "d"')} <= {"abc", "abbdc"}
    assert all(re.fullmatch("x[0-9]y", text) for text in texts(grammar='root ::= "x" [0-9] "y"'))


HOSTILE = {
    "deep": "[" * 5000,
    "nested": json.dumps(SCHEMAS["nested"]).replace('"d"', '"d' + "e" * 1000 + '"'),
    "wide": json.dumps({"type": "object", "properties": {f"p{i}": WORD for i in range(2000)}}),
    "product": json.dumps(
        {"allOf": [{"anyOf": [obj(**{f"a{i}{j}": WORD}) for j in range(9)]} for i in range(9)]},
    ),
    "patterns": json.dumps({"allOf": [{"type": "string", "pattern": f"^.*{i}.*$"} for i in range(30)]}),
    "repeats": json.dumps({"type": "string", "pattern": "(a{1,1000}){1,1000}"}),
    "ambiguous": json.dumps({"type": "string", "pattern": "(.*a.{30}b.*){10}"}),
    "items": json.dumps({"type": "array", "items": DIGIT, "minItems": 10**6}),
    "multiples": json.dumps({"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83)]}),
    "references": json.dumps(
        {
            "$ref": "#/$defs/d30",
            "$defs": {"d0": WORD}
            | {f"d{i}": obj(**{k: {"$ref": f"#/$defs/d{i - 1}"} for k in "lr"}) for i in range(1, 31)},
        }
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_bounded(engine, name):
    began = time.process_time()
    with contextlib.suppress(InvalidRequest):
        engine.generate(PROMPT, structured_outputs={"json": HOSTILE[name]}, max_tokens=20)
    assert time.process_time() - began < 10  # seconds of CPU; without bounds some take minutes
    assert engine.generate(PROMPT, max_tokens=2)[0].finish_reason == "length"


# ---- the distribution ----


def exact_distribution(schema_texts: list[str]) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of tokens that spells a text, renormalised at each token."""
    network, words = model(), [tokenizer().visible_bytes(i) for i in range(tokenizer().vocab_size)]
    wanted = [text.encode() for text in schema_texts]
    prompt = tokenizer().encode(PROMPT)
    found: dict[tuple[int, ...], float] = {}

    def visit(ids: tuple[int, ...], text: bytes, share: float) -> None:
        if text in wanted:  # no text begins another
            found[ids] = share
            return
        tokens = torch.tensor([*prompt, *ids])
        logits = network.logits(network(tokens, torch.arange(len(tokens)), WholeAttention())[-1])
        allowed = [i for i, word in enumerate(words) if word and any(w.startswith(text + word) for w in wanted)]
        shares = logits[allowed].softmax(-1).tolist()
        for token, part in zip(allowed, shares, strict=True):
            visit((*ids, token), text + words[token], share * part)

    with torch.inference_mode():
        visit((), b"", 1.0)
    return found


def test_the_distribution_is_the_networks_own_renormalised(any_engine):
    texts = ["to be", "to do", "that", "or"]
    expected = exact_distribution(texts)
    assert math.isclose(sum(expected.values()), 1.0, rel_tol=1e-4)
    number = 1000
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(0, number, 100):
        found = any_engine.generate(PROMPT, SamplingParams(n=100, max_tokens=20, structured_outputs={"choice": texts}))
        counts.update(tuple(completion.token_ids) for completion in found)
    assert counts.keys() <= expected.keys()
    common = [ids for ids, share in expected.items() if share * number >= 8]
    observed = [counts[ids] for ids in common]
    shares = [expected[ids] * number for ids in common]
    observed.append(number - sum(observed))
    shares.append(number - sum(shares))
    if shares[-1] < 1:
        observed[-2:], shares[-2:] = [sum(observed[-2:])], [sum(shares[-2:])]
    scale = sum(observed) / sum(shares)
    assert len(common) > 5
    assert chi_square_p(observed, [share * scale for share in shares]) > 1e-4


# ---- together with everything else ----


def ids_of(completions):
    return [completion.token_ids for completion in completions]


GREEDY = SamplingParams(temperature=0.0, max_tokens=120, structured_outputs={"json": PERSON})
SEEDED = SamplingParams(seed=7, max_tokens=400, n=3, structured_outputs={"json": PERSON})


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_speculation_changes_no_token(engine, any_engine, params):
    assert ids_of(any_engine.generate(PROMPT, params)) == ids_of(engine.generate(PROMPT, params))


def test_free_and_constrained_sequences_run_beside_each_other(engine):
    form = {"json": PERSON, "disable_any_whitespace": True}
    alone = engine.generate(PROMPT, seed=3, max_tokens=200, structured_outputs=form)[0]
    free = engine.generate(PROMPT, seed=3, max_tokens=60)[0]
    engine.add("a", tokenizer().encode(PROMPT), SamplingParams(seed=3, max_tokens=200, structured_outputs=form))
    engine.add("b", tokenizer().encode(PROMPT), SamplingParams(seed=3, max_tokens=60))
    found = {"a": [], "b": []}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    assert found == {"a": alone.token_ids, "b": free.token_ids}


def test_penalties_log_probabilities_filters_and_a_minimum_length(any_engine):
    form = {"json": PERSON, "disable_any_whitespace": True}
    options = {"presence_penalty": 1.0, "repetition_penalty": 1.2, "top_k": 20, "top_p": 0.9, "logprobs": 2}
    found = any_engine.generate(PROMPT, structured_outputs=form, n=6, max_tokens=300, min_tokens=60, **options)
    for completion in found:
        check(completion, PERSON)
        assert [token.id for token in completion.tokens] == completion.token_ids
        assert all(token.logprob <= 0 for token in completion.tokens)


def test_the_end_token_is_ignored_only_while_more_may_follow(engine):
    [found] = engine.generate(PROMPT, structured_outputs={"regex": "a{3,6}"}, ignore_eos=True)
    assert (found.text, found.finish_reason) == ("aaaaaa", "stop")
    assert engine.generate(PROMPT, structured_outputs={"choice": ["or"]}, min_tokens=30)[0].text == "or"


def test_stop_strings_end_a_constrained_text(any_engine):
    [found] = any_engine.generate(PROMPT, structured_outputs={"regex": "[ab]{40}c+"}, stop=["c"], max_tokens=100)
    assert found.finish_reason == "stop"
    assert set(found.text) <= {"a", "b"}
    assert len(found.text) == 40


def test_preempted_and_resumed_texts_go_on_in_their_grammar():
    form = {"json": PERSON, "disable_any_whitespace": True}
    params = SamplingParams(seed=5, max_tokens=150, structured_outputs=form)
    whole = structured_engine().generate([PROMPT] * 6, params)
    tight = tiny_engine(model(), tokenizer=tokenizer(), num_blocks=40, prefix_cache=False)
    assert ids_of(tight.generate([PROMPT] * 6, params)) == ids_of(whole)
    assert tight.state.num_preempted > 0
    ids = whole[0].token_ids
    for cut in (1, len(ids) // 2, len(ids) - 1):
        resumed = structured_engine()
        resumed.add("r", tokenizer().encode(PROMPT), params, generated=[ids[:cut]], seed=5)
        rest = [token for _ in range(200) for output in resumed.step() for token in output.token_ids]
        assert [*ids[:cut], *rest] == ids


def test_steps_of_constrained_sequences_start_before_the_tokens_before_are_read(engine):
    ahead = structured_engine(kind=AsyncEagerBackend)
    for params in (SEEDED, GREEDY, SamplingParams(seed=2, max_tokens=9, structured_outputs={"regex": "a{5}"})):
        before = ahead._backend.num_started, ahead._backend.num_ahead
        assert ids_of(ahead.generate(PROMPT, params)) == ids_of(engine.generate(PROMPT, params))
        started, early = ahead._backend.num_started - before[0], ahead._backend.num_ahead - before[1]
        assert early >= started - params.n > 0  # all but those after a prompt
    assert ahead.state.num_blocks_used == 0


def test_a_constrained_sequence_that_joins_or_is_cancelled_while_a_step_runs_changes_nothing_for_others(engine):
    free, form = SamplingParams(seed=3, max_tokens=60), replace(SEEDED, n=1)
    expected = {"a": engine.generate(PROMPT, form)[0].token_ids, "b": engine.generate(PROMPT, free)[0].token_ids}
    ahead, found = structured_engine(kind=AsyncEagerBackend), {"a": [], "b": [], "gone": []}
    prompt = tokenizer().encode(PROMPT)
    for request_id, params in {"gone": replace(form, seed=8), "b": free}.items():
        ahead.add(request_id, prompt, params)
    for step in range(500):
        for output in ahead.step():
            found[output.request_id] += output.token_ids
        if step == 5:
            ahead.add("a", prompt, form)
        if step == 9:
            ahead.cancel("gone")
        if not ahead.has_work:
            break
    assert 0 < len(found.pop("gone")) < 11
    assert found == expected


def test_a_step_of_constrained_sequences_that_have_all_left_is_not_waited_for(engine):
    ahead = structured_engine(kind=AsyncEagerBackend)
    ahead.add("gone", tokenizer().encode(PROMPT), SEEDED)
    for _ in range(6):
        ahead.step()
    ahead.cancel("gone")
    assert not ahead.has_work
    assert ids_of(ahead.generate(PROMPT, SEEDED)) == ids_of(engine.generate(PROMPT, SEEDED))


def test_compiled_grammars_are_kept(engine):
    compiler = engine._inputs._grammars
    form = {"json": json.dumps(obj(kept=DIGIT))}
    first = compiler.compile(form)
    assert compiler.compile({**form}) is first
    for i in range(70):
        compiler.compile({"choice": [f"text {i}"]})
    assert compiler.compile(form) is not first
    assert len(compiler._grammars) == 64


def test_without_a_tokenizer_the_form_is_refused():
    with pytest.raises(InvalidRequest, match="ask for the form in the prompt"):
        tiny_engine().generate([[1, 2]], structured_outputs={"choice": ["a"]})
