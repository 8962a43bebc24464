"""How many tokens a step and a chunk of a prompt have."""

from __future__ import annotations

import pytest

from flambeau.llm.core.sequence import EncodedMedia, NoDetokenizer, PromptMedia, Sequence
from flambeau.llm.core.step_limits import MIN_BACKLOG, StepLimits, affordable_length, chunk_cost, with_whole_images
from flambeau.llm.sampling_params import SamplingParams


def prompt(length: int, num_computed: int = 0, *, scores_prompt: bool = False) -> Sequence:
    return Sequence(
        request_id="a",
        index=0,
        tokens=[*range(length)],
        num_prompt=length,
        params=SamplingParams(),
        seed=0,
        max_length=length + 10,
        detokenizer=NoDetokenizer(),
        num_computed=num_computed,
        scores_prompt=scores_prompt,
    )


@pytest.mark.parametrize(
    ("num_decodes", "num_prompts", "expected"),
    [
        (0, 1, 2048),  # nothing waits for the end of a long step
        (1, MIN_BACKLOG - 1, 512),
        (64, MIN_BACKLOG, 1024),
        (8, MIN_BACKLOG, 2048),
        (1000, MIN_BACKLOG, 512),
    ],
)
def test_steps_are_longer_where_many_prompts_wait_for_few_decodes(num_decodes, num_prompts, expected):
    limits = StepLimits(max_num_seqs=64, max_step_tokens=512, prompt_step_tokens=2048)
    assert limits.num_tokens(num_decodes, num_prompts) == expected


@pytest.mark.parametrize(
    ("settings", "sequence", "room", "has_others", "expected"),
    [
        ({}, prompt(600), 512, False, 512),
        ({}, prompt(600), 512, True, 256),
        ({}, prompt(600), 100, True, 64),
        ({}, prompt(600, num_computed=590), 512, True, 10),
        ({"attention_span": 1000}, prompt(9000, num_computed=1000), 512, False, 256),
        ({"attention_span": 1}, prompt(9000, num_computed=8000), 512, False, 8),
        ({}, prompt(600, scores_prompt=True), 512, False, 256),
        ({"whole_prompts": True}, prompt(600, scores_prompt=True), 512, True, 600),
    ],
)
def test_length_of_a_chunk(settings, sequence, room, has_others, expected):
    limits = StepLimits(max_num_seqs=4, max_step_tokens=512, **settings)
    assert limits.chunk_length(sequence, room, has_others=has_others) == expected


@pytest.mark.parametrize(("start", "length"), [(0, 512), (1000, 256), (9000, 51), (100_000, 5)])
def test_affordable_chunk_costs_no_more_than_the_room(start, length):
    assert affordable_length(512, start, 1000) == length
    assert chunk_cost(length, start, 1000) <= 512 < chunk_cost(length + 1, start, 1000)
    assert (affordable_length(512, start, None), chunk_cost(7, start, None)) == (512, 7)


@pytest.mark.parametrize(
    ("num_computed", "length", "expected"),
    [
        (0, 4, 4),  # ends before the first image
        (0, 5, 5),
        (0, 6, 5),  # would end in the image: ends before it
        (0, 14, 5),
        (0, 15, 15),  # ends with the image
        (0, 17, 17),
        (5, 1, 10),  # begins with the image: takes all of it
        (5, 9, 10),
        (9, 2, 6),  # its first part is cached
        (5, 16, 15),  # takes the first image and the text, and ends before the second
        (20, 3, 10),
        (30, 4, 4),
    ],
)
def test_a_chunk_never_ends_within_an_image(num_computed, length, expected):
    sequence = prompt(40, num_computed)
    sequence.media = tuple(PromptMedia(start, end, EncodedMedia(b"a", None)) for start, end in [(5, 15), (20, 30)])
    assert with_whole_images(sequence, length) == expected
