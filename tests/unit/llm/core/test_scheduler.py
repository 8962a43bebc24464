"""The scheduler decides without tensors: which sequences run, how many tokens of each, and which are preempted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator

import pytest

from flambeau.llm.core.block_pool import BlockPool
from flambeau.llm.core.outputs import NO_TOKEN, SampledTokens
from flambeau.llm.core.scheduler import Scheduler, ignore_removal
from flambeau.llm.core.sequence import EncodedMedia, NoDetokenizer, PromptMedia, Sequence
from flambeau.llm.core.step_limits import StepLimits, chunk_cost
from flambeau.llm.core.step_plan import StepPlan
from flambeau.llm.sampling_params import SamplingParams


def new(name: str, num_tokens: int, max_length: int = 64) -> Sequence:
    return Sequence(
        request_id=name,
        index=0,
        tokens=[*range(num_tokens)],
        num_prompt=num_tokens,
        params=SamplingParams(),
        seed=0,
        max_length=max_length,
        detokenizer=NoDetokenizer(),
    )


def scheduler(
    num_blocks: int = 33,
    *,
    eos_ids: Collection[int] = (),
    on_remove: Callable[[Sequence], None] = ignore_removal,
    **limits: int,
) -> Scheduler:
    pool = BlockPool(num_blocks, 4, prefix_cache=False)
    step_limits = StepLimits(**{"max_num_seqs": 4, "max_step_tokens": 16, **limits})
    return Scheduler(pool, step_limits, eos_ids=eos_ids, on_remove=on_remove)


def run(scheduler: Scheduler, lookahead: int = 0) -> StepPlan:
    """Plan a step, and let every sequence that is due get a token."""
    plan = scheduler.plan(lookahead)
    finished = plan.finished_prompts
    for chunk in plan.chunks:
        scheduler._cache.set_computed(chunk.sequence, chunk.sequence.num_computed + chunk.length)
    for sequence in [*plan.decodes, *finished]:
        scheduler._cache.set_computed(sequence, len(sequence.tokens))
        sequence.tokens.append(0)
    return plan


def chunks(plan: StepPlan) -> list[tuple[str, int]]:
    return [(chunk.sequence.request_id, chunk.length) for chunk in plan.chunks]


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.request_id for sequence in sequences]


def test_a_long_prompt_takes_several_steps():
    plans = scheduler(max_step_tokens=8)
    plans.add([new("long", 20)])
    assert [chunks(run(plans)) for _ in range(3)] == [[("long", 8)], [("long", 8)], [("long", 4)]]
    assert names(run(plans).decodes) == ["long"]


def test_steps_without_decodes_may_be_longer():
    plans = scheduler(max_step_tokens=8, prompt_step_tokens=16)
    plans.add([new("a", 40)])
    assert chunks(run(plans)) == [("a", 16)]
    plans.add([new("b", 4)])
    assert chunks(run(plans)) == [("a", 8), ("b", 4)]
    beside = run(plans)
    assert (names(beside.decodes), chunks(beside)) == (["b"], [("a", 7)])


def test_steps_are_longer_while_many_prompts_wait():
    options = {"max_num_seqs": 64, "max_step_tokens": 8, "prompt_step_tokens": 32}
    plans = scheduler(num_blocks=400, **options)
    for i in range(40):
        plans.add([new(f"{i}", 4)])
    numbers = []
    for _ in range(8):
        plan = run(plans)
        numbers.append((len(plan.decodes), sum(length for _, length in chunks(plan))))
    assert [decodes + tokens for decodes, tokens in numbers[:6]] == [32] * 6
    assert numbers[6:] == [(26, 1)] * 2  # fewer than 16 wait


def test_a_few_long_prompts_make_no_step_longer():
    plans = scheduler(num_blocks=400, max_num_seqs=64, max_step_tokens=8, prompt_step_tokens=32)
    plans.add([new("short", 4)])
    run(plans)
    for i in range(15):
        plans.add([new(f"{i}", 40)])
    assert sum(length for _, length in chunks(run(plans))) == 7


def test_prompts_that_wait_for_the_end_of_a_sequence_make_no_step_longer():
    plans = scheduler(num_blocks=400, max_num_seqs=2, max_step_tokens=8, prompt_step_tokens=32)
    plans.add([new("short", 4)])
    run(plans)
    plans.add([new("long", 40)])
    run(plans)
    for i in range(30):
        plans.add([new(f"{i}", 4)])
    assert sum(length for _, length in chunks(run(plans))) <= 7


def test_decodes_come_before_prompts():
    plans = scheduler(max_step_tokens=8)
    plans.add([new("first", 4)])
    run(plans)
    plans.add([new("second", 20)])
    plan = run(plans)
    assert names(plan.decodes) == ["first"]
    assert chunks(plan) == [("second", 7)]


def test_prompts_start_in_order_of_arrival():
    plans = scheduler(max_step_tokens=10)
    for name in "abc":
        plans.add([new(name, 6)])
    assert chunks(run(plans)) == [("a", 6), ("b", 2), ("c", 2)]
    assert chunks(run(plans)) == [("b", 4), ("c", 4)]


def test_a_long_prompt_leaves_room_to_those_behind_it():
    plans = scheduler(max_step_tokens=8)
    plans.add([new("long", 40)])
    plans.add([new("short", 4)])
    assert chunks(run(plans)) == [("long", 4), ("short", 4)]
    plan = run(plans)
    assert names(plan.decodes) == ["short"]
    assert chunks(plan) == [("long", 7)]


def test_prompts_advance_however_many_sequences_decode():
    plans = scheduler(max_step_tokens=4)
    for name in "abc":
        plans.add([new(name, 1)])
    run(plans)
    plans.add([new("d", 6)])
    plan = run(plans, lookahead=3)
    assert names(plan.decodes) == ["a", "b", "c"]
    assert chunks(plan) == [("d", 1)]


def test_no_more_than_max_num_seqs_run():
    plans = scheduler(max_num_seqs=2)
    for name in "abc":
        plans.add([new(name, 2)])
    run(plans)
    assert names(plans.running) == ["a", "b"]
    assert names([*plans.waiting]) == ["c"]


def test_a_prompt_without_blocks_waits_and_none_passes_it():
    plans = scheduler(num_blocks=9)
    plans.add([new("small", 12)])
    run(plans)
    plans.add([new("large", 24)])
    plans.add([new("tiny", 2)])
    assert chunks(run(plans)) == []
    plans.remove(plans.running[0])
    assert chunks(run(plans)) == [("large", 8), ("tiny", 2)]


def test_no_prefix_is_looked_up_while_no_block_is_free(monkeypatch):
    plans = scheduler(num_blocks=5)
    plans.add([new("first", 14)])
    run(plans)
    plans.add([new("second", 14)])
    monkeypatch.setattr(BlockPool, "match_prefix", None)
    assert chunks(run(plans)) == []
    assert names([*plans.waiting]) == ["second"]


def test_the_last_arrival_is_preempted_when_blocks_run_out():
    plans = scheduler(num_blocks=9, max_step_tokens=64)
    for name in "ab":
        plans.add([new(name, 14)])
    preempted = []
    while len(preempted) < 1:
        preempted += names(run(plans).preempted)
    assert preempted == ["b"]
    assert names(plans.running) == ["a"]
    assert plans.waiting[0].blocks == []


@pytest.mark.parametrize(("number", "computed"), [(0, 2), (1, 6), (2, 10), (9, 14)])
def test_the_end_of_a_cached_prefix_may_be_computed_again(number, computed):
    """14 tokens begin with three full blocks of four, which are cached."""
    limits = StepLimits(max_num_seqs=4, max_step_tokens=16)
    plans = Scheduler(BlockPool(33, 4), limits, num_recomputed_blocks=number)
    plans.add([new("first", 14)])
    run(plans)
    plans.add([new("second", 14)])
    assert chunks(run(plans)) == [("second", computed)]
    assert len({*plans.running[1].blocks[:3]} & {*plans.running[0].blocks[:3]}) == max(0, 3 - number)


def test_drafted_tokens_have_room_but_never_beyond_the_end():
    plans = scheduler()
    sequence = new("a", 4, max_length=7)
    plans.add([sequence])
    run(plans, lookahead=5)
    run(plans, lookahead=5)
    assert len(sequence.blocks) == 2


def started(plans: Scheduler, *sequences: Sequence) -> StepPlan:
    """The plan of a step that decodes these."""
    for sequence in sequences:
        plans.add([sequence])
    run(plans)
    return plans.plan()


def test_the_next_step_is_planned_while_one_runs_but_not_beyond_the_end():
    plans, long, short = scheduler(), new("long", 7), new("short", 7, max_length=9)
    plan = started(plans, long, short)
    assert [len(each.blocks) for each in (long, short)] == [2, 2]
    assert names(plans.plan_next(plan).decodes) == ["long"]
    assert [len(each.blocks) for each in (long, short)] == [3, 2]  # for the token that is not known yet


def test_no_step_is_planned_ahead_while_prompts_wait_or_blocks_are_missing():
    plans = scheduler()
    plan = started(plans, new("one", 7))
    plans.add([new("other", 3)])
    assert plans.plan_next(plan) is None
    plans = scheduler(num_blocks=3)
    assert plans.plan_next(started(plans, new("one", 7))) is None
    plans = scheduler()
    plans.add([new("prompt", 7)])
    assert plans.plan_next(plans.plan()) is None


def test_a_full_batch_is_planned_ahead_although_prompts_wait():
    plans = scheduler(max_num_seqs=1)
    plan = started(plans, new("one", 7))
    plans.add([new("other", 3)])
    assert names(plans.plan_next(plan).decodes) == ["one"]


def test_tokens_of_a_sequence_that_left_meanwhile_are_dropped():
    plans = scheduler()
    plan = started(plans, new("one", 7), new("other", 7))
    plans.cancel("one")
    assert [output.request_id for output in plans.update(plan, sample(plan))] == ["other"]


def test_nothing_is_preempted_for_drafted_tokens():
    plans = scheduler(num_blocks=9, max_step_tokens=64)
    for name in "ab":
        plans.add([new(name, 13)])
    run(plans, lookahead=4)
    plan = run(plans, lookahead=4)
    assert (names(plan.decodes), plan.preempted, plan.lookahead) == (["a", "b"], [], 0)
    plans.remove(plans.running[1])
    assert run(plans, lookahead=4).lookahead == 4


def test_what_is_removed_leaves_nothing_behind():
    plans = scheduler()
    sequence, waiting = new("a", 20), new("b", 4)
    plans.add([sequence])
    run(plans)
    plans.add([waiting])
    plans.remove(sequence)
    plans.remove(waiting)
    assert not plans.has_work
    assert plans.plan() == StepPlan()


def sample(plan: StepPlan, token: int = 7) -> list[SampledTokens]:
    """What an executor would return: the same token for every sequence that is due."""
    return [SampledTokens(sequence, [token]) for sequence in [*plan.decodes, *plan.finished_prompts]]


def test_an_update_appends_tokens_and_removes_what_ends():
    removed: list[Sequence] = []
    plans = scheduler(eos_ids={9}, on_remove=removed.append)
    sequence = new("a", 3)
    plans.add([sequence])
    for token in (7, 8):
        plan = plans.plan()
        outputs = plans.update(plan, sample(plan, token))
        assert [(output.token_ids, output.finish_reason) for output in outputs] == [([token], None)]
    plan = plans.plan()
    assert [output.finish_reason for output in plans.update(plan, sample(plan, 9))] == ["stop"]
    assert removed == [sequence]
    assert not plans.has_work
    assert not plans.has_request("a")


def test_choices_start_when_their_prompt_is_computed():
    plans = scheduler()
    choices = [new("a", 3) for _ in range(3)]
    plans.add(choices)
    assert [*plans.waiting] == choices[:1]
    plan = plans.plan()
    plans.update(plan, sample(plan))
    assert [*plans.waiting] == choices[1:]


def test_a_canceled_request_frees_its_blocks_and_is_forgotten():
    removed: list[Sequence] = []
    plans = scheduler(on_remove=removed.append)
    plans.add([new("a", 3)])
    plans.plan()
    plans.cancel("a")
    plans.cancel("unknown")
    assert names(removed) == ["a"]
    assert not plans.has_work


def test_logits_that_are_not_finite_end_the_sequence_with_an_error():
    plans = scheduler()
    plans.add([new("a", 3)])
    plan = plans.plan()
    (output,) = plans.update(plan, sample(plan, NO_TOKEN))
    assert (output.finish_reason, output.token_ids, "logit_bias" in output.error) == ("error", [], True)


# ---- tenants ----


def of(tenant: str, name: str, num_tokens: int) -> Sequence:
    sequence = new(name, num_tokens)
    sequence.tenant = tenant
    return sequence


def test_tenant_that_has_used_fewer_tokens_is_next():
    plans = scheduler(max_num_seqs=3, max_step_tokens=8)
    for i in range(4):
        plans.add([of("a", f"a{i}", 4)])
    plans.add([of("b", "b0", 4)])
    assert chunks(run(plans)) == [("a0", 4), ("b0", 4)]
    assert names(run(plans).decodes) == ["a0", "b0"]
    assert chunks(run(plans)) == [("a1", 4)]
    assert names(plans.waiting) == ["a2", "a3"]


def test_prompts_of_tenants_are_computed_in_turns():
    plans = scheduler(max_step_tokens=8)
    plans.add([of("a", "a0", 20)])
    plans.add([of("a", "a1", 20)])
    run(plans)
    plans.add([of("b", "b0", 20)])
    assert chunks(run(plans)) == [("b0", 4), ("a0", 2), ("a1", 2)]


def test_prompt_of_a_light_tenant_has_a_step_of_its_own_but_not_two_in_a_row():
    plans = scheduler(max_num_seqs=4, max_step_tokens=16)
    plans.add([of("a", "a0", 4)])
    run(plans)
    plans.add([of("b", "b0", 4)])
    plan = run(plans, lookahead=3)
    assert (names(plan.decodes), chunks(plan), plan.lookahead) == ([], [("b0", 4)], 0)
    plans.add([of("c", "c0", 4)])
    assert {*names(run(plans).decodes)} == {"a0", "b0"}
    assert chunks(run(plans)) == [("c0", 4)]


STEP_COST = 16  # of the weights, in tokens


def cost(plan: StepPlan) -> int:
    """How long a step takes, in the time of one token."""
    tokens = len(plan.decodes) + sum(chunk.length for chunk in plan.chunks)
    return STEP_COST + tokens if tokens else 0


def first_token_costs(plans: Scheduler, crowd: Iterator[Sequence], num_tokens: int) -> list[int]:
    """How long the prompts of a light tenant take beside a crowd, with the step that runs when they arrive."""
    every = 50 + num_tokens  # steps: the light tenant sends less than a token a step
    found: list[int] = []
    light, since, last = None, 0, 0
    for i in itertools.count(1):
        if i % 10 == 1:
            for each in itertools.islice(crowd, max(0, 40 - len(plans.waiting))):
                plans.add([each])
        if light is None and i % every == 0:
            light, since = of("light", f"light{i}", num_tokens), last
            light.max_length = num_tokens + 8
            plans.add([light])
        plan = run(plans)
        last = cost(plan)
        since += last
        if light is not None and light.num_generated == 1:
            found.append(since)
            if len(found) == 6:
                return found[1:]  # the first begins with the crowd
        for sequence in [*plans.running]:
            if sequence.room <= 0:
                light = None if sequence is light else light
                plans.cancel(sequence.request_id)
    raise AssertionError


@pytest.mark.parametrize("num_tokens", [40, 600])
@pytest.mark.parametrize(
    ("num_keys", "prompt", "output"),
    [(1, 10, 64), (1, 2000, 4), (1, 30, 2000), (4, 2000, 4), (4, 300, 1000)],
    ids=["short", "long prompts", "long outputs", "keys with long prompts", "keys with long outputs"],
)
def test_first_token_beside_a_crowd_comes_within_twice_its_time_alone(num_keys, prompt, output, num_tokens):
    def crowd() -> Iterator[Sequence]:
        for i in itertools.count():
            sequence = of(f"key{i % num_keys}", f"crowd{i}", prompt)
            sequence.max_length = prompt + output
            yield sequence

    options = {"num_blocks": 3000, "max_num_seqs": 16, "max_step_tokens": 512}
    alone = max(first_token_costs(scheduler(**options), iter(()), num_tokens))
    beside = max(first_token_costs(scheduler(**options), crowd(), num_tokens))
    assert beside <= 2 * alone


def busy(num_blocks: int, max_num_seqs: int, prompt: int = 40) -> Scheduler:
    """Sequences of a heavy tenant decode in all places; a light one was there before them."""
    plans = scheduler(num_blocks, max_num_seqs=max_num_seqs, max_step_tokens=64)
    plans.add([of("b", "b0", 4)])
    run(plans)
    plans.cancel("b0")
    for i in range(4):
        plans.add([of("a", f"a{i}", prompt)])
        plans.waiting[-1].max_length = 1000
    while not all(sequence.is_decoding for sequence in plans.running) or not plans.running:
        run(plans)
    for _ in range(30):
        run(plans)
    return plans


def test_new_sequence_of_a_light_tenant_takes_a_place_that_a_heavy_one_has():
    plans = busy(1000, max_num_seqs=4)
    plans.add([of("b", "b1", 4)])
    plan = run(plans)
    assert (chunks(plan), names(plan.preempted)) == ([("b1", 4)], ["a3"])
    assert plans.plan_next(plan) is None
    plans.cancel("b1")
    assert "a3" in [name for _ in range(3) for name, _ in chunks(run(plans))]


def test_new_sequence_of_a_light_tenant_takes_the_blocks_that_it_needs_and_no_more():
    plans = busy(1 + 4 * 18 + 5, max_num_seqs=6)
    plans.add([of("b", "b1", 40)])
    plan = run(plans)
    assert (chunks(plan), len(plan.preempted)) == ([("b1", 40)], 1)


def test_nothing_is_preempted_for_a_sequence_that_would_not_fit_anyway():
    plans = busy(1 + 4 * 18 + 5, max_num_seqs=6)
    plans.add([of("b", "b1", 4 * 90)])
    assert not run(plans).preempted
    assert names(plans.waiting) == ["b1"]


def test_a_sequence_that_was_preempted_preempts_nobody():
    plans = busy(1000, max_num_seqs=4)
    again = of("b", "b1", 4)
    again.num_preempted = 1
    plans.add([again])
    assert not run(plans).preempted


def test_where_blocks_run_out_a_light_tenant_keeps_its_own():
    plans = busy(1 + 4 * 18 + 3, max_num_seqs=6)
    plans.add([of("b", "b1", 4)])
    preempted = [name for _ in range(30) for name in names(run(plans).preempted)]
    assert preempted
    assert "b1" not in preempted


def test_decodes_of_a_heavy_tenant_rotate_where_they_are_more_than_a_short_step():
    plans = scheduler(1000, max_num_seqs=8, max_step_tokens=64, short_step_tokens=3)
    plans.add([of("b", "b0", 2)])
    run(plans)
    plans.cancel("b0")
    for i in range(8):
        plans.add([of("a", f"a{i}", 20)])
        plans.waiting[-1].max_length = 1000
    for _ in range(200):
        run(plans)
    steps = [names(run(plans).decodes) for _ in range(3)]
    assert [len(step) for step in steps] == [3] * 3
    assert {name for step in steps for name in step} == {f"a{i}" for i in range(8)}


def test_a_long_prompt_leaves_half_of_a_step_to_others_but_no_piece_is_small():
    plans = scheduler(1000, max_num_seqs=6, max_step_tokens=512)
    for name in "abcdef":
        plans.add([new(name, 600, max_length=1000)])
    assert chunks(plans.plan()) == [("a", 256), ("b", 128), ("c", 64), ("d", 64)]


def test_chunks_become_shorter_with_the_context_so_that_steps_take_the_same_time():
    plans = scheduler(3000, max_step_tokens=512, attention_span=1000)
    plans.add([new("running", 4, max_length=1000)])
    run(plans)
    plans.add([new("long", 9000, max_length=10000)])
    lengths, start = [], 0
    while (plan := run(plans)).chunks:
        [chunk] = plan.chunks
        lengths.append(chunk.length)
        assert names(plan.decodes) == ["running"]
        assert chunk_cost(chunk.length, start, 1000) <= 512
        start += chunk.length
    assert lengths[:3] == [511, 338, 276]
    assert min(lengths[:-1]) >= 50


# ---- images ----


def with_images(sequence: Sequence, *places: tuple[int, int], digest: bytes = b"a") -> Sequence:
    sequence.media = tuple(PromptMedia(start, end, EncodedMedia(digest, None)) for start, end in places)
    return sequence


def test_a_prompt_with_images_takes_whole_images_however_small_the_steps():
    plans = scheduler(max_step_tokens=4)
    plans.add([with_images(new("a", 24), (3, 11), (12, 20))])
    lengths = []
    while (plan := run(plans)).chunks:
        lengths += [length for _, length in chunks(plan)]
    assert lengths == [3, 8, 1, 8, 4]


def test_blocks_of_different_images_are_told_apart():
    contents = {digest: with_images(new("a", 12), (2, 10), digest=digest).contents(0, 12) for digest in (b"a", b"b")}
    assert contents[b"a"][:2] == contents[b"b"][:2]
    assert contents[b"a"][10:] == contents[b"b"][10:]
    assert not {*contents[b"a"][2:10]} & {*contents[b"b"][2:10]}
    assert len({*contents[b"a"][2:10]}) == 8
    assert new("a", 12).contents(3, 7) == new("a", 12).tokens[3:7]
