import json

import pytest

from flambeau.handlers.generation.reply_formats import ChoiceOutput, JsonFormat, PieceFormat
from flambeau.llm.chat.stream_parser import ParserOptions, StreamParser, ThoughtMarkers
from flambeau.llm.core.outputs import Output, SequenceCounts, TokenInfo
from flambeau.wire.generation import decode_pieces


class Decoder:
    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


def output(text: str, **fields) -> Output:
    return Output(request_id="r", index=0, text=text, token_ids=[5], **fields)


def new_format(num_choices: int = 1, thought: ThoughtMarkers | None = None, *, is_chat: bool = True) -> PieceFormat:
    parsers = [StreamParser(ParserOptions(thought=thought)) for _ in range(num_choices)] if is_chat else ()
    return PieceFormat(Decoder(), stream=True, num_choices=num_choices, preambles={}, parsers=parsers)


def pieces_of(reply: PieceFormat, *outputs: Output, is_over: bool = False):
    body = reply.take([ChoiceOutput(i, each) for i, each in enumerate(outputs)], is_over=is_over)
    return None if body is None else decode_pieces(body)


@pytest.mark.parametrize("is_chat", [False, True])
def test_each_text_is_sent_once_and_the_last_piece_has_the_counts(is_chat):
    reply = new_format(is_chat=is_chat)
    counts = SequenceCounts(num_prompt=3, num_generated=3, num_cached=0, num_drafted=0, num_accepted=0)
    found = [
        pieces_of(reply, output("Once")),
        pieces_of(reply, output("")),
        pieces_of(reply, output(" upon")),
        pieces_of(reply, output("", finish_reason="length", counts=counts), is_over=True),
    ]
    assert found[1] is None
    assert [(piece.text, piece.finish_reason, piece.num_tokens) for pieces in found if pieces for piece in pieces] == [
        ("Once", None, 0),
        (" upon", None, 0),
        ("", "length", 3),
    ]


def test_choices_with_text_have_a_piece_each_and_those_without_have_none():
    reply = new_format(3)
    [first, second] = pieces_of(reply, output("a"), output(""), output("c"))
    assert (first.index, first.text, second.index, second.text) == (0, "a", 2, "c")


def test_reasoning_and_answer_are_separate_in_every_piece():
    reply = new_format(thought=ThoughtMarkers(open="<t>", close="</t>"))
    texts = ["<t>hm", "m</t>", "yes", " no"]
    pieces = [piece for text in texts for piece in pieces_of(reply, output(text)) or ()]
    assert "".join(piece.reasoning for piece in pieces) == "hmm"
    assert "".join(piece.text for piece in pieces) == "yes no"
    assert not any(piece.reasoning and piece.text for piece in pieces)


def test_a_token_without_text_is_sent_if_its_log_probability_is_asked_for():
    [piece] = pieces_of(new_format(), output("", tokens=[TokenInfo(7, -0.5)]))
    assert piece.text == ""
    assert [(token.id, token.text, token.logprob) for token in piece.tokens] == [(7, "<7>", -0.5)]


def scoring_format(**options) -> PieceFormat:
    return PieceFormat(Decoder(), num_choices=2, preambles={}, prompts=[[7, 8], [9]], **options)


def test_ids_are_sent_with_each_step_and_those_of_the_prompt_once():
    reply = scoring_format(stream=True, returns_ids=True)
    first, second = pieces_of(reply, output(""), output("b"))
    assert (first.text, first.token_ids, first.prompt_ids) == ("", [5], [7, 8])
    assert (second.text, second.token_ids, second.prompt_ids) == ("b", [5], [9])
    [again] = pieces_of(reply, output("c"))
    assert (again.text, again.token_ids, again.prompt_ids) == ("c", [5], None)


def test_the_next_worker_does_not_send_the_prompt_again():
    reply = scoring_format(stream=True, returns_ids=True, begun=[0])
    first, second = pieces_of(reply, output("a"), output("b"))
    assert (first.token_ids, first.prompt_ids, second.prompt_ids) == ([5], None, [9])


def test_scores_of_prompts_have_as_many_alternatives_as_each_asks_for():
    infos = [TokenInfo(8, -2.0, ((1, -0.5), (2, -0.7), (3, -0.9)), 4)]
    reply = scoring_format(stream=False, first_tokens={0: 7}, num_alternatives=1, num_prompt_alternatives=2)
    ends = [output("a", tokens=[TokenInfo(5, -0.1)], prompt_tokens=infos, finish_reason="stop")]
    ends.append(output("b", prompt_tokens=[], finish_reason="stop"))
    first, second = pieces_of(reply, *ends, is_over=True)
    assert [(token.id, token.logprob, len(token.top)) for token in first.tokens] == [
        (7, None, 0),
        (8, -2.0, 1),
        (5, -0.1, 0),
    ]
    [begin, scored] = first.prompt_tokens
    assert (begin.id, begin.logprob) == (7, None)
    assert (scored.id, scored.logprob, scored.rank, [each[0] for each in scored.top]) == (8, -2.0, 4, [1, 2])
    assert [(token.id, token.logprob) for token in second.prompt_tokens] == [(9, None)]


class CountingDecoder(Decoder):
    num_texts = 0

    def token_text(self, token_id: int) -> str:
        self.num_texts += 1
        return super().token_text(token_id)


def test_scores_of_a_prompt_are_made_once_for_all_its_choices():
    infos = [TokenInfo(8, -2.0, ((1, -0.5), (2, -0.7)), 4)]
    counts = []
    for number in (1, 9):
        decoder = CountingDecoder()
        options = {"prompts": [[7, 8]], "first_tokens": dict.fromkeys(range(number), 7), "num_alternatives": 1}
        reply = PieceFormat(
            decoder, stream=False, num_choices=number, preambles={}, num_prompt_alternatives=2, **options
        )
        ends = [output("a", prompt_tokens=infos, finish_reason="stop") for _ in range(number)]
        pieces = pieces_of(reply, *ends, is_over=True)
        assert [token.id for token in pieces[-1].prompt_tokens] == [7, 8]
        assert [token.id for token in pieces[-1].tokens] == [7, 8]
        counts.append(decoder.num_texts)
    assert counts[0] == counts[1]


def test_details_of_a_prediction_have_the_scores_of_its_prompt():
    infos = [TokenInfo(8, -2.0, ((1, -0.5),), 4)]
    reply = JsonFormat("", 1, Decoder(), details=True)
    body = reply.take([ChoiceOutput(0, output("a", prompt_tokens=infos, finish_reason="stop"))], is_over=True)
    assert json.loads(body)["details"]["prompt_logprobs"] == [
        {"id": 8, "text": "<8>", "logprob": -2.0, "top": [{"id": 1, "text": "<1>", "logprob": -0.5}]}
    ]
