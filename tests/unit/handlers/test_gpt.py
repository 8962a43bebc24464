"""GptHandler called directly: its stages, what subclasses change, and the jobs it keeps in the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flambeau.errors import BadRequest, HandlerError, PredictionException
from flambeau.handlers.gpt import PAD, GptHandler
from flambeau.llm.executor.backend import PLAIN_PYTORCH
from flambeau.testing.context import new_handler_context
from flambeau.torchserve.handlers.mock_context import MockContext
from flambeau.wire.generation import Generate, SamplingOptions, decode_pieces, encode_request
from flambeau.wire.messages import Part, Request
from flambeau.worker.stage_clock import StageClock
from support.language_models import CONTEXT, write_language_model
from support.log_records import logged

GREEDY = {"compile": False, "temperature": 0, "max_new_tokens": 8, "max_num_seqs": 8, "num_blocks": 64}
PROMPT = "To be, or not"
DOCS = Path(__file__).parents[3] / "docs" / "llm.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_language_model(tmp_path_factory.mktemp("model"))


def new_handler(folder, kind=GptHandler, **options):
    handler = kind()
    handler.initialize(new_handler_context(model_dir=folder, config={"handler": {**GREEDY, **options}}))
    return handler


@pytest.fixture(scope="module")
def handler(folder):
    handler = new_handler(folder)
    yield handler
    state = handler.engine.state
    assert (state.num_running, state.num_waiting, state.num_blocks_used) == (0, 0, 0)


def handle(handler, *bodies, headers=()):
    context = new_handler_context(requests=[*bodies], headers=headers)
    return handler.handle(context.rows, context)


# ---- the stages, as the seed has them ----


def test_stages_take_and_give_what_their_table_says(handler):
    handler.context = None
    ids = handler.preprocess([{"data": PROMPT}, {"body": "the sea of troubles, and"}])
    assert (ids.dtype, ids.dim(), ids.device) == (torch.long, 2, handler.device)
    assert (ids == PAD).any()
    full_ids = handler.inference(ids)
    texts = handler.postprocess(full_ids)
    assert [type(text) for text in texts] == [str, str]
    assert texts[0].startswith(PROMPT)
    assert (full_ids[0] != PAD).sum() == (ids[0] != PAD).sum() + 8


def test_generate_gives_the_whole_sequence_and_calls_back_for_each_token(handler):
    prompt_ids = handler.preprocess([{"data": PROMPT}])[0]
    told = []
    full_ids = handler.generate(prompt_ids, 5, temperature=0.0, callback=told.append)
    assert full_ids.dim() == 1
    assert full_ids[: len(prompt_ids)].tolist() == prompt_ids.tolist()
    assert full_ids[len(prompt_ids) :].tolist() == [token.item() for token in told]
    assert len(told) == 5
    both_ids = handler.generate(torch.stack([prompt_ids, prompt_ids]), 5, temperature=0.0)
    assert both_ids.tolist() == [full_ids.tolist()] * 2


def test_speculative_decode_gives_what_generate_does(handler):
    prompt_ids = handler.preprocess([{"data": PROMPT}])[0]
    plain_ids = handler.generate(prompt_ids, handler.max_new_tokens, temperature=0.0)
    assert (
        handler.speculative_decode(prompt_ids, handler.draft_model, 4, temperature=0.0).tolist() == plain_ids.tolist()
    )


def test_draft_drafts_and_changes_nothing(folder, handler, tmp_path):
    write_language_model(tmp_path / "draft", seed=1)
    options = {"speculative": True, "draft_model_path": str(tmp_path / "draft"), "speculate_k": 3}
    drafting = new_handler(folder, **options)
    assert isinstance(drafting.draft_model, torch.nn.Module)
    [reply] = handle(drafting, {"data": PROMPT, "details": True})
    assert reply["generated_text"] == handle(handler, {"data": PROMPT})[0]["generated_text"]
    assert reply["details"]["drafted_tokens"] > 0
    prompt_ids = handler.preprocess([{"data": PROMPT}])
    plain_ids = handler.generate(prompt_ids, handler.max_new_tokens, temperature=0.0)
    for k in (3, 5):  # its own, and another depth
        drafted_ids = drafting.speculative_decode(prompt_ids, drafting.draft_model, k, temperature=0.0)
        assert drafted_ids.tolist() == plain_ids.tolist()
    brought_ids = handler.speculative_decode(prompt_ids, drafting.draft_model, 2, temperature=0.0)
    assert brought_ids.tolist() == plain_ids.tolist()
    with pytest.raises(HandlerError, match="draft_model must be a network of this server"):
        handler.speculative_decode(prompt_ids, "a path", 2)


def test_attributes_are_those_of_the_settings(handler):
    assert (handler.max_new_tokens, handler.temperature, handler.top_k) == (8, 0, None)
    assert handler.device == torch.device("cpu")
    assert handler.tokenizer.decode(handler.tokenizer.encode(PROMPT)) == PROMPT
    assert handler.draft_model is None
    assert isinstance(handler.model, torch.nn.Module)


def test_networks_are_there_also_where_steps_are_compiled(folder, tmp_path):
    write_language_model(tmp_path / "draft", seed=1)
    compiled = new_handler(folder, compile=True, speculative=True, draft_model_path=str(tmp_path / "draft"))
    assert isinstance(compiled.model, torch.nn.Module)
    assert isinstance(compiled.draft_model, torch.nn.Module)
    compiled.engine.close()


def test_engine_says_what_it_runs_with(folder, tmp_path, caplog):
    caplog.set_level("INFO")
    write_language_model(tmp_path / "draft", seed=1)
    drafting = {"speculative": True, "draft_model_path": str(tmp_path / "draft"), "speculate_k": 3}
    handler = new_handler(folder, quantization="int8", dtype="bfloat16", **drafting)
    [(path, _, info), (how,)] = logged(caplog, "flambeau.handlers.gpt", "INFO")  # nothing about calls
    assert how.startswith("compile: false: every step runs as plain PyTorch")
    assert (path, info) == (folder, handler.engine.info)
    assert (info.num_blocks, info.max_length, info.decode) == (64, CONTEXT, PLAIN_PYTORCH)
    told = handler.describe_handle()
    assert (told["device"], told["dtype"], told["quantization"]) == ("cpu", "bfloat16", "int8")
    assert (told["speculation"], told["speculate_k"], told["block_size"]) == ("draft", 3, 16)
    assert (told["compile"], told["decode"], told["context_length"]) == (False, "plain PyTorch", CONTEXT)


def test_handle_answers_each_request_by_its_own_settings(handler):
    long, short, without = handle(
        handler,
        {"data": PROMPT},
        {"prompt": PROMPT, "max_new_tokens": 3, "details": True},
        {"prompt": PROMPT, "return_full_text": False},
    )
    assert long["generated_text"].startswith(PROMPT)
    assert PROMPT + without["generated_text"] == long["generated_text"]
    assert long["generated_text"].startswith(short["generated_text"])
    assert short["details"]["finish_reason"] == "length"
    assert short["details"]["generated_tokens"] == 3


def test_prompt_is_answered_as_it_was_sent_though_its_tokens_spell_it_otherwise(handler):
    sent = "  To be\n"
    assert handle(handler, sent)[0]["generated_text"].startswith(sent)


# ---- the server's way ----


def request(body, job_id=1, *, state=(), accept="", kind="predict"):
    headers = [("Content-Type", "application/json"), ("Accept", accept)]
    return Request(job_id, f"r{job_id}", headers, b"", kind, state=[*state]), {"body": body}


def join(handler, body, job_id=1, **options):
    handler.generation().join(*request(body, job_id, **options))


def run(handler):
    """Step until nothing is left; the parts of each job."""
    generation, parts = handler.generation(), {}
    while generation.has_work:
        for made in generation.step():
            assert isinstance(made, Part), made
            parts.setdefault(made.job_id, []).append(made)
    assert all(own[-1].last and not any(part.last for part in own[:-1]) for own in parts.values())
    return parts


def text_of(parts):
    return b"".join(part.body for part in parts).decode()


def events_of(parts):
    chunks = text_of(parts).split("\n\n")
    assert chunks.pop() == ""
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def pieces_of(parts):
    return [piece for part in parts for piece in decode_pieces(part.body)]


def test_whole_reply_is_one_part_and_says_the_same_as_handle(handler):
    join(handler, {"data": PROMPT})
    [part] = run(handler)[1]
    assert part.headers == [("content-type", "application/json")]
    assert json.loads(part.body) == handle(handler, {"data": PROMPT})[0]


def test_stream_of_text_is_the_new_text_in_pieces(handler):
    whole = handle(handler, {"data": PROMPT, "return_full_text": False})[0]["generated_text"]
    join(handler, {"data": PROMPT, "stream": True})
    parts = run(handler)[1]
    assert text_of(parts) == whole
    assert len(parts) > 4
    assert parts[0].headers == [("content-type", "text/plain; charset=utf-8")]
    assert all(part.headers is None and part.state == b"" for part in parts[1:])


def test_stream_of_events_ends_with_why_and_how_much(handler):
    join(handler, {"data": PROMPT}, accept="text/event-stream")
    *events, last = events_of(run(handler)[1])
    whole = handle(handler, {"data": PROMPT, "return_full_text": False})[0]["generated_text"]
    assert "".join(event["text"] for event in events) == whole
    assert (last["done"], last["finish_reason"], last["generated_tokens"]) == (True, "length", 8)
    assert last["prompt_tokens"] == len(handler.tokenizer.encode(PROMPT))


def test_stream_has_the_prompt_only_where_it_is_asked_for(handler):
    join(handler, {"data": PROMPT, "stream": True, "return_full_text": True})
    assert text_of(run(handler)[1]).startswith(PROMPT)


def test_several_choices_are_distinguished(handler):
    join(handler, {"data": PROMPT, "n": 2})
    document = json.loads(text_of(run(handler)[1]))
    assert document["generated_texts"] == [document["generated_text"]] * 2  # greedy
    join(handler, {"data": PROMPT, "n": 2}, accept="text/event-stream")
    events = events_of(run(handler)[1])
    assert {event["index"] for event in events} == {0, 1}
    assert [event["done"] for event in events if "done" in event] == [False, True]
    with pytest.raises(BadRequest, match="n must be 1 in a stream of text"):
        join(handler, {"data": PROMPT, "n": 2, "stream": True})


def test_request_of_a_front_end_is_answered_in_pieces(handler):
    sampling = SamplingOptions(max_tokens=4, temperature=0.0, n=2)
    body = encode_request(Generate(prompts=[PROMPT, [5, 6, 7]], sampling=sampling, stream=True, echo=True))
    join(handler, body, kind="generate")
    pieces = pieces_of(run(handler)[1])
    texts = ["".join(piece.text for piece in pieces if piece.index == i) for i in range(4)]
    assert texts[0] == texts[1] == handle(handler, {"data": PROMPT, "max_tokens": 4})[0]["generated_text"]
    assert texts[2] == texts[3]
    assert [piece.num_tokens for piece in pieces if piece.finish_reason] == [4] * 4
    join(handler, encode_request(Generate(prompts=[PROMPT], sampling=sampling)), kind="generate")
    whole = pieces_of(run(handler)[1])
    assert [(piece.index, piece.finish_reason, PROMPT + piece.text) for piece in whole] == [
        (0, "length", texts[0]),
        (1, "length", texts[0]),
    ]


def test_chat_is_rendered_by_the_tokenizer(handler):
    chat = [{"role": "user", "content": "to be?"}]
    join(handler, encode_request(Generate(messages=chat, sampling=SamplingOptions(max_tokens=3))), kind="generate")
    [piece] = pieces_of(run(handler)[1])
    assert piece.num_prompt_tokens == len(handler.tokenizer.encode_chat(chat))
    join(handler, {"messages": chat, "max_new_tokens": 3})
    assert json.loads(text_of(run(handler)[1]))["generated_text"] == piece.text


TOOLS = [{"type": "function", "function": {"name": "weather"}}]
SHOWS_TOOLS = """
{%- for tool in tools or [] %}tool {{ tool.function.name }};{% endfor %}
{%- for message in messages %}
    {%- for call in message.tool_calls or [] %}called {{ call.function.arguments.city }};{% endfor %}
    {%- if message.content %}{{ message.role }} {{ message.content }};{% endif %}
{%- endfor %}"""


def test_tools_calls_and_their_results_reach_the_chat_template(tmp_path):
    folder = write_language_model(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": SHOWS_TOOLS}))
    handler = new_handler(folder)
    function = {"name": "weather", "arguments": '{"city": "the sea"}'}
    messages = [
        {"role": "user", "content": "to be"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "or not"},
    ]
    body = encode_request(Generate(messages=messages, tools=TOOLS))
    [ids] = handler._reader.generate(body, None).prompts
    assert handler.tokenizer.decode(ids) == "tool weather;user to be;called the sea;tool or not;"


def test_tools_that_the_model_would_never_see_are_refused(handler):
    body = encode_request(Generate(messages=[{"role": "user", "content": "to be"}], tools=TOOLS))
    with pytest.raises(BadRequest, match="chat template does not show tools to the model; leave tools out"):
        join(handler, body, kind="generate")


def test_messages_that_do_not_fit_the_chat_template_are_refused_with_its_reason(tmp_path):
    folder = write_language_model(tmp_path / "model")
    template = "{% if messages[1:] %}{{ raise_exception('one message') }}{% endif %}{{ nothing.there }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    handler = new_handler(folder)
    message = {"role": "user", "content": "to be"}
    with pytest.raises(BadRequest, match="refuses these messages: one message"):
        join(handler, {"messages": [message, message]})
    with pytest.raises(BadRequest, match="role must be a word"):
        join(handler, {"messages": [{"role": "", "content": "to be"}]})
    with pytest.raises(BadRequest, match=r"do not fit the model's chat template: .*UndefinedError"):
        join(handler, {"messages": [message]})


def test_front_ends_request_is_as_long_as_the_context_unless_somebody_limits_it(handler, folder):
    join(
        handler, encode_request(Generate(prompts=[PROMPT], sampling=SamplingOptions(ignore_eos=True))), kind="generate"
    )
    [piece] = pieces_of(run(handler)[1])
    assert (piece.finish_reason, piece.num_tokens) == ("length", 8)  # the model's own limit
    unlimited = new_handler(folder, max_new_tokens=None)
    join(
        unlimited,
        encode_request(Generate(prompts=[PROMPT], sampling=SamplingOptions(ignore_eos=True))),
        kind="generate",
    )
    [piece] = pieces_of(run(unlimited)[1])
    assert piece.num_prompt_tokens + piece.num_tokens == CONTEXT


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"data": "to be " * CONTEXT}, f"tokens and the model's context {CONTEXT}"),
        ({"data": "x" * CONTEXT * 300}, f"characters, and the model's context only {CONTEXT} tokens"),
        ({"data": [5, 10**6]}, "token ids outside of 0"),
        ({"data": ""}, "data is empty"),
    ],
)
def test_prompt_that_cannot_be_answered_is_the_clients_fault(handler, body, reason):
    with pytest.raises(BadRequest, match=reason):
        join(handler, body)
    with pytest.raises(BadRequest, match=reason):
        handle(handler, body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"nonsense", "the body is not a generation request"),
        (b"\x81\xb0template_options" + b"\x81\xa1a" * 50_000 + b"\xc0", "the body is not a generation request"),
        (encode_request(Generate(prompts=[])), "prompts times n must be 1 to 1024, not 0"),
        (encode_request(Generate(prompts=[PROMPT, ""])), "the prompt is empty"),
        (encode_request(Generate(prompts=[PROMPT, [10**6]])), "token ids outside"),
        (
            encode_request(Generate(prompts=[PROMPT] * 9, sampling=SamplingOptions(n=128))),
            "prompts times n must be 1 to 1024",
        ),
        (encode_request(Generate(prompts=[PROMPT], sampling=SamplingOptions(temperature=-1))), "temperature must be"),
        (encode_request(Generate(messages=[{"content": 5}])), "messages"),
        (encode_request(Generate(messages=[{"role": "user", "content": "x" * CONTEXT * 300}])), "the chat has 76800"),
        (
            encode_request(Generate(prompts=[PROMPT], sampling=SamplingOptions(stop=["x"] * 65))),
            "stop must be at most 64 texts",
        ),
        (
            encode_request(Generate(prompts=[PROMPT], sampling=SamplingOptions(stop=["x" * 1001]))),
            "at most 1000 characters",
        ),
    ],
)
def test_front_ends_request_that_makes_no_sense_is_refused_whole(handler, body, reason):
    with pytest.raises(BadRequest, match=reason):
        join_and_read(handler, body)
    assert not handler.generation().has_work


def join_and_read(handler, body):
    """Join, and raise the error of a long request, which is read beside the steps."""
    join(handler, body, kind="generate")
    while handler.generation().has_work:
        for result in handler.generation().step():
            if isinstance(result, tuple):
                raise result[1]


def test_too_many_prompts_are_not_even_cut_into_tokens(handler, monkeypatch):
    monkeypatch.setattr(handler._reader, "_tokenizer", None)
    with pytest.raises(BadRequest, match="prompts times n must be 1 to 1024, not 1025"):
        join_and_read(handler, encode_request(Generate(prompts=[PROMPT] * 1025)))


def test_tool_call_whose_arguments_are_nested_without_end_costs_nothing(handler):
    call = {"function": {"name": "f", "arguments": "[" * 200_000}}
    message = {"role": "assistant", "content": "x", "tool_calls": [call]}
    join(handler, encode_request(Generate(messages=[message], sampling=SamplingOptions(max_tokens=1))), kind="generate")
    assert run(handler)[1][-1].last


@pytest.mark.parametrize("form", [{}, {"stream": True}, {"n": 2}])
def test_text_that_broke_off_is_no_answer(folder, form):
    broken = new_handler(folder)
    with torch.inference_mode():
        broken.model.lm_head.weight.fill_(torch.nan)
    join(broken, {"data": PROMPT, **form})
    [(job_id, error)] = broken.generation().step()
    assert (job_id, error.error_code) == (1, 500)
    assert "no finite numbers" in error.message
    assert not broken.generation().has_work
    with pytest.raises(PredictionException, match="no finite numbers"):
        handle(broken, {"data": PROMPT})


def test_cancelled_job_leaves_no_block_behind(handler):
    for job_id in (1, 2):
        join(handler, {"data": PROMPT, "max_new_tokens": 100}, job_id)
    handler.generation().step()
    handler.generation().cancel(1)
    assert [*run(handler)] == [2]
    assert handler.engine.state.num_blocks_used == 0


def test_direct_call_and_jobs_share_the_engine(handler):
    join(handler, {"data": PROMPT, "stream": True})
    handler.generation().step()
    alone = handle(handler, {"data": PROMPT, "return_full_text": False})[0]["generated_text"]
    parts = run(handler)[1]
    assert parts[-1].last
    join(handler, {"data": PROMPT, "stream": True})
    assert text_of(run(handler)[1]) == alone


# ---- going on after a worker has died ----


@pytest.fixture(scope="module")
def lasting(folder):
    return new_handler(folder, resume=True, max_new_tokens=30)


def stream(handler, body, *, kind="predict", accept="", state=(), most=None):
    """The parts of a job alone, and after `most` of them it is cancelled."""
    join(handler, body, kind=kind, accept=accept, state=state)
    generation, parts = handler.generation(), []
    while generation.has_work:
        parts += generation.step()
        if most is not None and len(parts) >= most:
            generation.cancel(1)
    return parts


@pytest.mark.parametrize("most", [1, 2, 5, 11])
@pytest.mark.parametrize("body", [{"temperature": 0.0}, {"temperature": 1.5, "seed": 3}])
def test_stream_goes_on_exactly_where_it_stopped(lasting, body, most):
    body = {"data": PROMPT, "stream": True, **body}
    whole = stream(lasting, body)
    first = stream(lasting, body, most=most)
    rest = stream(lasting, body, state=[part.state for part in first])
    assert text_of([*first, *rest]) == text_of(whole)
    assert all(part.state for part in whole[:-1])
    # … and once more, from what both workers have said
    again = stream(lasting, body, state=[part.state for part in [*first, *rest][:-1]])
    assert text_of([*first, *rest[:-1], *again]) == text_of(whole)


def test_stream_goes_on_exactly_where_it_stopped_with_a_draft_too(folder, lasting, tmp_path):
    write_language_model(tmp_path / "draft", seed=1)
    options = {"speculative": True, "draft_model_path": str(tmp_path / "draft"), "speculate_k": 3}
    drafting = new_handler(folder, resume=True, max_new_tokens=30, **options)
    body = {"data": PROMPT, "stream": True, "temperature": 1.0, "seed": 8}
    whole = text_of(stream(lasting, body))
    assert text_of(stream(drafting, body)) == whole
    for most in (1, 3, 7):
        first = stream(drafting, body, most=most)
        assert text_of([*first, *stream(drafting, body, state=[part.state for part in first])]) == whole


def test_stream_without_a_seed_goes_on_with_the_one_it_had(lasting):
    body = {"data": PROMPT, "stream": True, "temperature": 1.0, "ignore_eos": True}
    first = stream(lasting, body, most=4)
    rests = {text_of(stream(lasting, body, state=[part.state for part in first])) for _ in range(3)}
    assert len(rests) == 1


def test_stop_string_that_was_half_held_back_is_found_after_the_change(lasting):
    text = text_of(stream(lasting, {"data": PROMPT, "stream": True}))
    stop = text[10:16]
    body = {"data": PROMPT, "stream": True, "stop": [stop]}
    whole = stream(lasting, body)
    assert text_of(whole) == text[: text.index(stop)]
    for most in range(1, len(whole)):
        first = stream(lasting, body, most=most)
        assert text_of([*first, *stream(lasting, body, state=[part.state for part in first])]) == text_of(whole)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_choices_go_on_each_where_it_stopped_and_finished_ones_are_left(lasting, most):
    sampling = SamplingOptions(max_tokens=12, temperature=1.2, seed=5, n=3)
    request = Generate(prompts=[PROMPT, "the sea"], sampling=sampling, stream=True, echo=True)
    body = encode_request(request)

    def texts(parts):
        pieces = pieces_of(parts)
        finished = [piece.index for piece in pieces if piece.finish_reason]
        assert len(finished) == len({*finished})
        return ["".join(piece.text for piece in pieces if piece.index == i) for i in range(6)]

    whole = stream(lasting, body, kind="generate")
    first = stream(lasting, body, kind="generate", most=most)
    rest = stream(lasting, body, kind="generate", state=[part.state for part in first])
    assert texts([*first, *rest]) == texts(whole)


def test_counts_of_a_reply_that_went_on_are_those_of_the_whole(lasting):
    body = {"data": PROMPT}
    first = stream(lasting, body, accept="text/event-stream", most=5)
    rest = stream(lasting, body, accept="text/event-stream", state=[part.state for part in first])
    assert events_of(rest)[-1]["generated_tokens"] == 30


def test_state_that_cannot_be_read_fails_the_job_rather_than_repeat_text(lasting):
    with pytest.raises(RuntimeError, match="cannot be resumed"):
        join(lasting, {"data": PROMPT, "stream": True}, state=[b"nonsense"])


# ---- subclasses ----


class Shouting(GptHandler):
    def preprocess(self, data):
        return super().preprocess(
            [{"data": row["body"]["data"] + " or not to be", "max_new_tokens": 4} for row in data]
        )

    def postprocess(self, data):
        return [text.upper() for text in super().postprocess(data)]


class Own(GptHandler):
    def inference(self, data, *args, **kwargs):
        self.asked = data.shape
        return super().inference(data)


class OwnTokens(GptHandler):
    def preprocess(self, data):
        return torch.tensor([[1, 2, 3, row["body"]["token"]] for row in data])


def test_stages_of_a_subclass_are_honored_in_both_ways(folder):
    handler = new_handler(folder, Shouting)
    [direct] = handle(handler, {"data": "To be"})
    assert direct["generated_text"].startswith("TO BE OR NOT TO BE")
    join(handler, {"data": "To be", "stream": True})  # only a whole text can be postprocessed
    [part] = run(handler)[1]
    assert json.loads(part.body) == direct


def test_stages_that_openai_s_api_goes_past_are_named_once(folder, caplog):
    handler = new_handler(folder, Shouting)
    assert handler.generation() is not None
    assert logged(caplog, "flambeau.handlers.gpt") == [("Shouting", "preprocess and postprocess")]


@pytest.mark.parametrize(("kind", "config"), [(Shouting, {"openai": False}), (GptHandler, {})])
def test_nothing_is_said_of_openai_s_api_where_it_goes_past_nothing(folder, caplog, kind, config):
    handler = kind()
    handler.initialize(new_handler_context(model_dir=folder, config={"handler": GREEDY, **config}))
    assert handler.generation() is not None
    assert not logged(caplog, "flambeau.handlers.gpt")


def test_openai_in_the_handler_section_is_sent_to_its_place(folder):
    with pytest.raises(HandlerError, match="openai belongs beside the handler section"):
        new_handler(folder, Shouting, openai=False)


def test_subclass_with_its_own_inference_is_called_in_batches(folder, caplog):
    caplog.set_level("INFO")
    handler = new_handler(folder, Own)
    assert handler.generation() is None
    assert ("Own", "inference") in [record.args for record in caplog.records if record.levelname == "INFO"]
    replies = handle(handler, {"data": PROMPT}, {"data": "the sea"})
    assert handler.asked[0] == 2
    assert [set(reply) for reply in replies] == [{"generated_text"}] * 2


def test_subclass_may_read_requests_that_only_it_understands(folder):
    handler = new_handler(folder, OwnTokens)
    [reply] = handle(handler, {"token": 7})
    join(handler, {"token": 7})
    assert json.loads(text_of(run(handler)[1])) == reply


def test_subclass_with_its_own_loop_gets_one_prompt_at_a_time(folder):
    class Backwards(GptHandler):
        def generate(self, prompt_tokens, max_new_tokens, temperature=1.0, top_k=None, callback=None):
            assert (max_new_tokens, temperature, top_k) == (5, 0, None)
            return prompt_tokens.flip(0)

    handler = new_handler(folder, Backwards, max_new_tokens=5)
    assert handler.generation() is None
    ids = handler.tokenizer.encode(PROMPT)
    assert handle(handler, {"data": PROMPT}) == [{"generated_text": handler.tokenizer.decode(ids[::-1])}]


class OwnGenerate(GptHandler):
    def generate(self, prompt_tokens, max_new_tokens, temperature=1.0, top_k=None, callback=None):
        self.told = (max_new_tokens, temperature, top_k)
        return prompt_tokens


@pytest.fixture(scope="module")
def own_generate(folder):
    return new_handler(folder, OwnGenerate)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", "x"),
        ("stop", ["x"]),
        ("n", 2),
        ("logprobs", 0),
        ("stream", True),
        ("seed", 1),
        ("top_p", 0.5),
        ("min_new_tokens", 2),
        ("return_full_text", False),
        ("details", True),
    ],
)
def test_field_that_an_own_generate_cannot_know_is_named(own_generate, field, value):
    with pytest.raises(BadRequest, match=f"^{field} is not known to OwnGenerate, whose generate is its own; leave it"):
        handle(own_generate, {"data": PROMPT, field: value})


def test_fields_that_an_own_generate_is_told_or_that_change_nothing_are_taken(own_generate):
    asked = {"data": PROMPT, "max_new_tokens": 3, "temperature": 0.5, "top_k": 7}
    nothing = {"n": 1, "stream": False, "details": False, "return_full_text": True, "stop": None, "speculate": False}
    assert handle(own_generate, {**asked, **nothing}) == [{"generated_text": PROMPT}]
    assert own_generate.told == (3, 0.5, 7)


def test_own_generate_is_called_also_where_there_is_a_draft(folder, tmp_path):
    write_language_model(tmp_path / "draft", seed=1)
    handler = new_handler(folder, OwnGenerate, speculative=True, draft_model_path=str(tmp_path / "draft"))
    assert handle(handler, {"data": PROMPT, "max_new_tokens": 3}) == [{"generated_text": PROMPT}]
    assert handler.told == (3, 0, None)


def test_own_stage_may_read_the_fields_itself(folder):
    class OwnBoth(OwnGenerate):
        def inference(self, data, *args, **kwargs):
            return super().inference(data)

    assert handle(new_handler(folder, OwnBoth), {"data": PROMPT, "stream": True}) == [{"generated_text": PROMPT}]


def test_own_speculative_decode_is_as_long_as_asked_for(folder, tmp_path):
    class OwnSpeculation(GptHandler):
        def speculative_decode(self, prompt_tokens, *args, **kwargs):
            return super().speculative_decode(prompt_tokens, *args, **kwargs)

    write_language_model(tmp_path / "draft", seed=1)
    handler = new_handler(folder, OwnSpeculation, speculative=True, draft_model_path=str(tmp_path / "draft"))
    short, usual = handle(handler, {"data": PROMPT, "max_new_tokens": 2}, {"data": PROMPT})
    plain = new_handler(folder)
    assert short == handle(plain, {"data": PROMPT, "max_new_tokens": 2})[0]
    assert usual == handle(plain, {"data": PROMPT})[0]


@pytest.mark.parametrize("drafts", [False, True])
def test_inference_goes_through_the_documented_method_once_for_the_whole_batch(folder, tmp_path, monkeypatch, drafts):
    options = {}
    if drafts:
        write_language_model(tmp_path / "draft", seed=1)
        options = {"speculative": True, "draft_model_path": str(tmp_path / "draft")}
    handler = new_handler(folder, **options)
    bodies = [{"data": PROMPT}, {"data": "the sea", "max_new_tokens": 3, "stop": "e", "details": True}]
    usual = handle(handler, *bodies)
    name = "speculative_decode" if drafts else "generate"
    method, calls = getattr(GptHandler, name), []

    def spied(self, prompt_tokens, *args, **kwargs):
        calls.append(prompt_tokens.shape[0])
        return method(self, prompt_tokens, *args, **kwargs)

    monkeypatch.setattr(GptHandler, name, spied)
    assert handle(handler, *bodies) == usual
    assert calls == [2]
    assert usual[1]["details"]["generated_tokens"] <= 3


# ---- as a script or a test of TorchServe's calls it ----


def test_handler_works_with_a_mock_context(folder, handler):
    context = MockContext(model_pt_file=None, model_file=None, model_dir=str(folder), gpu_id=None)
    context.model_yaml_config = {"handler": GREEDY}
    mocked = GptHandler()
    mocked.initialize(context)
    assert mocked.handle([{"data": PROMPT}], context) == handle(handler, {"data": PROMPT})


@pytest.mark.parametrize("drafts", [False, True])
def test_manual_seed_repeats_a_text(folder, tmp_path, drafts):
    options = {}
    if drafts:
        write_language_model(tmp_path / "draft", seed=1)
        options = {"speculative": True, "draft_model_path": str(tmp_path / "draft")}
    handler = new_handler(folder, temperature=1.5, max_new_tokens=20, **options)

    def texts(seed):
        torch.manual_seed(seed)
        return [handle(handler, {"data": PROMPT})[0]["generated_text"] for _ in range(2)]

    first = texts(1)
    assert texts(1) == first
    assert texts(2) != first
    assert first[0] != first[1]


def test_own_loop_over_the_logits_gives_the_engine_s_text(folder, handler):
    [block] = [block for block in DOCS.read_text().split("```python\n") if "class OwnLoop" in block]
    names: dict[str, Any] = {}
    exec(block.partition("```")[0], names)
    own = new_handler(folder, names["OwnLoop"])
    bodies = [{"data": PROMPT}, {"data": "the sea of troubles, and", "max_new_tokens": 5}]
    assert handle(own, *bodies) == handle(handler, *bodies)


# ---- settings ----


def test_pt2_and_a_misspelled_key_are_named(folder, caplog):
    config = {"handler": GREEDY, "pt2": "inductor", "dtyp": "float16"}
    GptHandler().initialize(new_handler_context(model_dir=folder, config=config))
    assert logged(caplog, "flambeau.handlers.gpt") == [("GptHandler",)]
    assert logged(caplog, "flambeau.handlers.options") == [("dtyp", "dtype")]


def test_gpus_that_become_copies_are_named(folder, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    new_handler(folder)
    assert logged(caplog, "flambeau.handlers.gpt") == [(4, 4)]


def test_ranks_that_were_not_started_are_named(folder, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(HandlerError, match="set parallelType: tp and parallelLevel: 2"):
        new_handler(folder, tensor_parallel_size=2)


def test_generation_is_measured(folder):
    handler = new_handler(folder)
    metrics = handler.context.metrics
    metrics.take()
    join(handler, {"data": PROMPT})
    run(handler)
    samples = {name: (value, ids) for name, _, _, value, _, ids in metrics.take()}
    assert samples["GeneratedTokens"] == (8, "r1")
    assert samples["PromptTokens"] == (len(handler.tokenizer.encode(PROMPT)), "r1")
    assert samples["TimeToFirstToken"][0] > 0
    assert samples["TokensPerSecond"][0] > 0


def test_stages_with_a_clock_around_them_are_not_overridden():
    handler = GptHandler()
    StageClock().watch(handler)
    assert not any(handler._overrides(name) for name in ("preprocess", "inference", "postprocess", "generate"))
    handler.postprocess = lambda completions: completions
    assert handler._overrides("postprocess")
