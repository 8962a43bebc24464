"""Requests of chats; and the state with which another worker resumes a reply."""

from __future__ import annotations

import pytest

from flambeau.errors import BadRequest
from flambeau.handlers.generation.reply_formats import ChoiceOutput
from flambeau.handlers.generation.request_reader import RequestReader, ResumeState, encode_step, read_state
from flambeau.llm.chat.chat_format import ChatFormat
from flambeau.llm.core.outputs import Output, SequenceCounts
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.text.tokenizer import load_tokenizer
from flambeau.wire.generation import CallPiece, Generate, SamplingOptions, decode_pieces, encode_request
from support.tokenizer_files import byte_level_json, write_json_tokenizer


def test_steps_add_up():
    parts = [
        encode_step({0: [1, 2], 1: [3]}, set(), seed=9),
        encode_step({1: [4]}, {1}, seed=None),
        encode_step({0: [5]}, {1}, seed=None),
    ]
    state = read_state(parts)
    assert (state.seed, state.tokens, state.finished) == (9, {0: [1, 2, 5], 1: [3, 4]}, {1})


def test_unreadable_steps_give_no_state():
    assert read_state([]) is None
    assert read_state([b"nonsense"]) is None
    assert read_state([encode_step({0: [1]}, set(), seed=None)]) is None  # its beginning is missing


# ---- a text between two others ----

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


def test_suffix_becomes_a_prompt_with_the_models_markers(tmp_path):
    reader, tokenizer = reader_of(tmp_path, "", ("<|begin|>", "<|end|>", *FIM))
    request = Generate(prompts=["def f(", ""], suffix="):")
    made = reader.generate(encode_request(request), None)
    texts = ["".join(map(tokenizer.token_text, ids)) for ids in made.prompts]
    assert texts == [
        "<|begin|><|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>",
        "<|begin|><|fim_prefix|><|fim_suffix|>):<|fim_middle|>",
    ]
    assert made.params.stop_token_ids == (tokenizer.special_id("<|fim_pad|>"),)


def test_suffix_is_refused_where_a_vocabulary_has_no_markers(tmp_path):
    reader, _ = reader_of(tmp_path, "")
    with pytest.raises(BadRequest, match="suffix"):
        reader.generate(encode_request(Generate(prompts=["a"], suffix="b")), None)
    assert reader.generate(encode_request(Generate(prompts=["a"])), None).params.stop_token_ids == ()


# ---- chats ----

HERMES = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[-1].content }}<tool_call>"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]


def reader_of(tmp_path, template, special=("<|begin|>", "<|end|>"), **options):
    folder = write_json_tokenizer(tmp_path, byte_level_json(special), eos_token="<|end|>", chat_template=template)
    tokenizer = load_tokenizer(folder)
    chat_format = ChatFormat.of(tokenizer, **options)
    reader = RequestReader(
        tokenizer,
        max_length=1000,
        defaults=SamplingParams(),
        has_own_limit=False,
        streams=False,
        chat_format=chat_format,
    )
    return reader, tokenizer


def chat(reader, progress=None, **fields):
    return reader.generate(encode_request(Generate(messages=[{"role": "user", "content": "a"}], **fields)), progress)


def test_turn_has_the_tools_that_may_be_called(tmp_path):
    reader, _ = reader_of(tmp_path, HERMES)
    turn = chat(reader, tools=TOOLS).turn
    assert ([tool["function"]["name"] for tool in turn.tools], turn.must_call, turn.is_parallel) == (
        ["f", "g"],
        False,
        True,
    )
    assert not turn.has_grammar
    turn = chat(reader, tools=TOOLS, tool_choice="required", tool_name="g").turn
    assert ([tool["function"]["name"] for tool in turn.tools], turn.must_call, turn.is_parallel) == (["g"], True, False)
    assert turn.has_grammar
    assert chat(reader, tools=TOOLS, parallel_tool_calls=False).turn.has_grammar
    assert reader.generate(encode_request(Generate(prompts=["a"])), None).turn is None


@pytest.mark.parametrize(
    ("end", "starts", "may_think"),
    [
        ("<think>", True, True),
        ("<think>\n\n</think>\n\n", False, False),
        ("{# </think> #}", False, True),
        ("", False, False),
    ],
)
@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_end_of_the_prompt_says_whether_the_model_thinks(tmp_path, end, starts, may_think, special):
    reader, _ = reader_of(
        tmp_path,
        "{{ messages[0].content }}" + end,
        ("<|begin|>", "<|end|>", *special),
        reasoning="auto" if end else "none",
    )
    turn = chat(reader).turn
    assert (turn.starts_in_thought, turn.may_think) == (starts, may_think or end == "<think>")


def test_parser_of_a_resumed_reply_has_read_its_beginning(tmp_path):
    reader, tokenizer = reader_of(tmp_path, HERMES)
    text = 'So.\n<tool_call>{"name": "f", "arguments": {"a": 1'
    state = ResumeState(7, {0: tokenizer.encode(text, add_special=False)})
    reply = chat(reader, state, tools=TOOLS, stream=True).reply
    output = Output(request_id="r", index=0, text="2}}</tool_call>", token_ids=[5], finish_reason="stop")
    [piece] = decode_pieces(reply.take([ChoiceOutput(0, output)], is_over=True))
    assert (piece.text, piece.calls, piece.finish_reason) == ("", [CallPiece(0, "", "2}")], "tool_calls")


@pytest.mark.parametrize(
    ("end", "reason"), [("}", "stop"), ("2", "stop"), ("2}", "tool_calls"), ("2}}</tool_", "tool_calls")]
)
def test_a_stop_string_within_the_arguments_of_a_call_is_no_call(tmp_path, end, reason):
    reader, tokenizer = reader_of(tmp_path, HERMES)
    text = '<tool_call>{"name": "g", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {"a": '
    state = ResumeState(7, {0: tokenizer.encode(text, add_special=False)})
    reply = chat(reader, state, tools=TOOLS, stream=True).reply
    output = Output(request_id="r", index=0, text=end, token_ids=[5], finish_reason="stop", stop="x")
    [piece] = decode_pieces(reply.take([ChoiceOutput(0, output)], is_over=True))
    assert piece.finish_reason == reason


def test_effort_is_for_the_template_or_a_limit_or_refused(tmp_path):
    known, _ = reader_of(tmp_path, "{{ reasoning_effort }}<think></think>")
    prompted = chat(known, reasoning_effort="low")
    assert prompted.turn.max_reasoning_tokens is None
    assert prompted.prompts != chat(known, reasoning_effort="high").prompts
    thinks, tokenizer = reader_of(tmp_path, "{{ enable_thinking }}{# </think> #}")
    assert chat(thinks, reasoning_effort="low").turn.max_reasoning_tokens == 1024
    assert chat(thinks, reasoning_effort="high").turn.max_reasoning_tokens is None
    assert chat(thinks, reasoning_effort="high", max_reasoning_tokens=5).turn.max_reasoning_tokens == 5
    assert tokenizer.decode(chat(thinks, max_reasoning_tokens=0).prompts[0]) == "False"
    with pytest.raises(BadRequest, match="one of none, minimal"):
        chat(thinks, reasoning_effort="odd")
    plain, _ = reader_of(tmp_path, HERMES)
    assert chat(plain, reasoning_effort="none").turn.max_reasoning_tokens is None
    for fields in ({"reasoning_effort": "low"}, {"max_reasoning_tokens": 5}):
        with pytest.raises(BadRequest, match="does not reason"):
            chat(plain, **fields)


def test_reasoning_and_calls_are_counted_and_sent_apart(tmp_path):
    reader, _ = reader_of(tmp_path, HERMES)
    reply = chat(reader, tools=TOOLS).reply
    texts = ["<think>", "Hm", "</think>", "So", '<tool_call>{"name": "f", "arguments": {}}</tool_call>']
    outputs = [Output(request_id="r", index=0, text=text, token_ids=[5]) for text in texts]
    for output in outputs:
        assert reply.take([ChoiceOutput(0, output)], is_over=False) is None
    counts = SequenceCounts(num_prompt=1, num_generated=6, num_cached=0, num_drafted=0, num_accepted=0)
    last = Output(request_id="r", index=0, text="", token_ids=[6], finish_reason="stop", counts=counts)
    [piece] = decode_pieces(reply.take([ChoiceOutput(0, last)], is_over=True))
    assert (piece.reasoning, piece.text, piece.calls) == ("Hm", "So", [CallPiece(0, "f", "{}")])
    assert (piece.num_reasoning_tokens, piece.num_tokens, piece.finish_reason) == (3, 6, "tool_calls")


# ---- fields of other servers ----


def test_a_long_prompt_is_cut_to_its_end_behind_the_token_that_begins_it(tmp_path):
    reader, tokenizer = reader_of(tmp_path, "")
    whole = tokenizer.encode("To be, or not to be, that is the question")

    def prompt_of(limit, prompt="To be, or not to be, that is the question", **fields):
        request = Generate(prompts=[prompt], truncate=limit, echo=True, **fields)
        return reader.generate(encode_request(request), None).prompts[0]

    assert prompt_of(5) == [whole[0], *whole[-4:]]
    assert prompt_of(1) == whole[:1]
    assert prompt_of(len(whole)) == prompt_of(None) == whole
    assert prompt_of(5, add_special=False) == whole[-5:]
    assert prompt_of(3, [7, 8, 9, 10]) == [8, 9, 10]
    long = [*range(7, 90)] * 20
    assert prompt_of(-1, long, sampling=SamplingOptions(max_tokens=300)) == long[-700:]
    assert len(prompt_of(-1, long)) == 999
    assert prompt_of(-1, long[:10]) == long[:10]


def test_the_echo_of_a_prompt_that_was_cut_is_its_end(tmp_path):
    reader, _ = reader_of(tmp_path, "")
    request = Generate(prompts=["To be, or not to be"], truncate=2, add_special=False, echo=True)
    made = reader.generate(encode_request(request), None)
    output = Output(request_id="r", index=0, text="!", token_ids=[5], finish_reason="stop")
    [piece] = decode_pieces(made.reply.take([ChoiceOutput(0, output)], is_over=True))
    assert piece.text.endswith(" be!")
    assert not piece.text.startswith("To")


def test_documents_need_a_template_that_shows_them(tmp_path):
    options = {"template_options": {"documents": [{"text": "Water is wet."}]}}
    reader, tokenizer = reader_of(tmp_path, "{% for d in documents %}{{ d.text }}{% endfor %}")
    assert tokenizer.decode(chat(reader, **options).prompts[0]) == "Water is wet."
    reader, _ = reader_of(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(BadRequest, match="does not show documents") as found:
        chat(reader, **options)
    assert found.value.field == "documents"


def test_the_last_message_is_continued(tmp_path):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    reader, tokenizer = reader_of(tmp_path, template)

    def text_of(**options):
        return tokenizer.decode(chat(reader, template_options=options).prompts[0])

    assert (text_of(), text_of(add_generation_prompt=False)) == ("[a]>", "[a]")
    assert text_of(continue_final_message=True) == "[a"


def test_prompts_are_scored_in_whole_replies_only(tmp_path):
    reader, _ = reader_of(tmp_path, "")
    sampling = SamplingOptions(prompt_logprobs=2)
    assert reader.generate(encode_request(Generate(prompts=["a"], sampling=sampling)), None).params.prompt_logprobs == 2
    with pytest.raises(BadRequest, match="leave stream out") as found:
        reader.generate(encode_request(Generate(prompts=["a"], sampling=sampling, stream=True)), None)
    assert found.value.field == "prompt_logprobs"
    row = {"prompt": "a", "prompt_logprobs": 2}
    assert reader.predict(reader.read(row), [1], None).is_stream is False
    with pytest.raises(BadRequest, match="leave stream out"):
        reader.predict(reader.read({**row, "stream": True}), [1], None)


def test_replies_with_millions_of_scores_of_prompts_are_refused(tmp_path):
    """They would take minutes to write, while all other requests wait."""
    reader, _ = reader_of(tmp_path, "")
    long = [*range(7, 907)]

    def generate(echo=False, prompts=(long,), **sampling):
        request = Generate(prompts=[*prompts], echo=echo, sampling=SamplingOptions(**sampling))
        return reader.generate(encode_request(request), None)

    assert generate(n=100, prompt_logprobs=20).params.n == 100
    assert generate(n=128, prompt_logprobs=10, logprobs=20).params.n == 128
    for fields, name in [
        ({"n": 128, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"n": 128, "logprobs": 20, "echo": True}, "logprobs"),
        ({"n": 16, "prompts": [long] * 8, "prompt_logprobs": 20}, "prompt_logprobs"),
    ]:
        with pytest.raises(BadRequest, match=r"2419200 log-probabilities .* send fewer choices") as found:
            generate(**fields)
        assert found.value.field == name
    row = {"prompt": "a", "prompt_logprobs": 20, "n": 128}
    with pytest.raises(BadRequest, match="send fewer choices"):
        reader.predict(reader.read(row), long, None)
