"""Generation jobs with an engine whose outputs are written down."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from flambeau.errors import BadRequest, InvalidField, PredictionException
from flambeau.handlers.generation.background_reads import LONG_BYTES
from flambeau.handlers.generation.generation_jobs import GptGeneration
from flambeau.handlers.generation.job_progress import GenerationMetrics
from flambeau.handlers.generation.reply_formats import TextFormat
from flambeau.handlers.generation.request_reader import ChatFiles, Prompted, encode_step, read_state
from flambeau.llm.core.outputs import Output, SequenceCounts
from flambeau.llm.errors import InvalidRequest, LLMError
from flambeau.llm.sampling_params import SamplingParams
from flambeau.wire.generation import Generate, MediaInput, encode_request
from flambeau.wire.messages import Request

COUNTS = SequenceCounts(num_prompt=3, num_generated=2, num_cached=1, num_drafted=4, num_accepted=1)


class FakeEngine:
    """Makes the outputs of `script`, a list of steps, and records what is asked."""

    max_length = 128
    adapters: tuple[str, ...] = ()

    def __init__(self):
        self.config = SimpleNamespace(max_num_seqs=4)
        self.added: dict[str, dict] = {}
        self.script: list[list[Output]] = []
        self.cancelled: list[str] = []
        self.error: Exception | None = None
        self.is_closed = False
        self.media: dict[str, list] = {}
        self.may_encode = threading.Event()
        self.may_compile = threading.Event()
        self.compiled: list = []
        self.was_cancelled: list[bool] = []

    @property
    def has_work(self):
        return bool(self.script)

    def add(
        self,
        name,
        ids,
        params,
        *,
        generated=None,
        seed=None,
        adapter="",
        turn=None,
        tenant="",
        scores_prompt=False,
        media=(),
        cache_salt="",
    ):
        if self.error is not None:
            raise self.error
        self.added[name] = {"ids": ids, "n": params.n, "generated": generated, "seed": seed}
        self.media[name] = [*media]

    def has_grammar(self, params, turn):
        return params.structured_outputs is None or params.structured_outputs in self.compiled

    def compile_grammar(self, params, turn):
        if params.structured_outputs is not None:
            assert self.may_compile.wait(30)
            if params.structured_outputs == {"regex": "("}:
                raise InvalidRequest("the regex cannot be enforced: (", "structured_outputs")
            self.compiled.append(params.structured_outputs)

    def encode_images(self, files, is_cancelled):
        assert self.may_encode.wait(30)
        for file in files:
            if file.data == b"bad":
                raise InvalidRequest(f"{file.name} is bad", file.name)
        self.was_cancelled.append(is_cancelled())
        return [file.data.upper() for file in files]

    def encode_sounds(self, sounds, is_cancelled):
        return [f"sound {sound}" for sound in sounds]

    def step(self):
        return self.script.pop(0)

    def cancel(self, name):
        self.cancelled.append(name)

    def close(self):
        self.is_closed = True


def output(name, text, *, index=0, reason=None, ids=(7,), error=""):
    counts = COUNTS if reason else None
    return Output(
        request_id=name, index=index, text=text, token_ids=[*ids], finish_reason=reason, counts=counts, error=error
    )


class Setup:
    def __init__(self, *, resume=False, n=1, prompts=((1, 2, 3),), seed=5, is_stream=True):
        self.engine = FakeEngine()
        self.finished = []
        self.states = []
        params = SamplingParams(n=n, seed=seed)

        def read(request, row, state):
            self.states.append(state)
            ids = [[*prompt] for prompt in prompts]
            return Prompted(prompts=ids, params=params, reply=TextFormat(), is_stream=is_stream)

        self.generation = GptGeneration(
            self.engine,
            read,
            abilities=("generate",),
            resume=resume,
            on_finished=lambda job, now: self.finished.append(job.request.job_id),
        )

    def join(self, job_id=1, state=()):
        self.generation.join(Request(job_id, f"r{job_id}", [], b"", "generate", state=[*state]), {})

    def run(self, *steps):
        self.engine.script = [*steps]
        results = []
        while self.generation.has_work:
            results += self.generation.step()
        return results


@pytest.fixture
def setup():
    return Setup()


# ---- replies ----


def test_outputs_of_a_step_become_one_part_for_each_job(setup):
    setup.join(1)
    setup.join(2)
    parts = setup.run(
        [output("1/0", "a"), output("2/0", "x")],
        [output("2/0", "", reason="stop")],
        [output("1/0", "b", reason="stop")],
    )
    assert [(part.job_id, part.body, part.last) for part in parts] == [
        (1, b"a", False),
        (2, b"x", False),
        (2, b"", True),
        (1, b"b", True),
    ]
    assert setup.finished == [2, 1]


def test_headers_are_in_the_first_part_only(setup):
    setup.join()
    first, last = setup.run([output("1/0", "a")], [output("1/0", "b", reason="stop")])
    assert first.headers == [("content-type", "text/plain; charset=utf-8")]
    assert last.headers is None


def test_output_without_text_sends_nothing(setup):
    setup.join()
    assert setup.run([output("1/0", "")]) == []


def test_job_ends_with_the_last_of_its_choices():
    setup = Setup(n=2, prompts=[[1], [2]])
    setup.join()
    assert [*setup.engine.added] == ["1/0", "1/2"]
    ends = [output(name, "", index=index, reason="stop") for name in ("1/0", "1/2") for index in (0, 1)]
    *_, last = setup.run(ends[:1], ends[1:3], ends[3:])
    assert last.last
    assert setup.finished == [1]


def test_tokens_after_the_first_are_counted_by_the_time_between_them(setup):
    setup.join(1)
    setup.join(2)
    setup.run(
        [output("1/0", "a"), output("2/0", "x")],
        [output("1/0", "b", ids=(7, 8)), output("2/0", "", ids=())],
        [output("2/0", "y")],
    )
    gaps = setup.generation._gaps
    assert (sum(gaps.counts), gaps.num_steps) == (3, 3)
    assert gaps.seconds > 0


def test_finished_job_is_removed_from_the_engine(setup):
    setup.join()
    setup.run([output("1/0", "a", reason="stop")])
    assert setup.engine.cancelled == ["1/0"]


# ---- failures ----


def test_choice_that_ends_with_an_error_fails_its_own_job_only(setup):
    setup.join(1)
    setup.join(2)
    failed, part = setup.run([output("1/0", "", reason="error", error="NaN"), output("2/0", "x")])
    assert failed[0] == 1
    assert isinstance(failed[1], PredictionException)
    assert "NaN" in str(failed[1].message)
    assert part.job_id == 2
    assert setup.finished == []


def test_job_that_the_engine_rejects_is_a_bad_request_and_leaves_nothing_behind(setup):
    setup.engine.error = LLMError("too long")
    with pytest.raises(BadRequest, match="too long"):
        setup.join()
    assert setup.engine.cancelled == ["1/0"]
    setup.generation.cancel(1)  # unknown
    assert setup.run([output("1/0", "a")]) == []


def test_cancelled_job_is_removed_at_once_and_its_outputs_are_dropped(setup):
    setup.join()
    setup.generation.cancel(1)
    assert setup.engine.cancelled == ["1/0"]
    assert setup.run([output("1/0", "a")]) == []


# ---- seeds ----


def test_prompts_of_a_request_with_a_seed_are_sampled_as_each_would_be_alone():
    setup = Setup(prompts=[[1], [2]], seed=5)
    setup.join()
    assert [added["seed"] for added in setup.engine.added.values()] == [5, 5]


def test_prompts_of_a_request_without_a_seed_differ():
    setup = Setup(prompts=[[1], [2]], seed=None)
    setup.join()
    first, second = (added["seed"] for added in setup.engine.added.values())
    assert first != second


# ---- resuming ----


def test_parts_carry_state_with_which_another_worker_resumes():
    first = Setup(resume=True)
    first.join()
    parts = first.run([output("1/0", "a", ids=[10])], [output("1/0", "", ids=[11])], [output("1/0", "b", ids=[12])])
    state = [part.state for part in parts]
    assert read_state(state).tokens == {0: [10, 11, 12]}

    second = Setup(resume=True)
    second.join(state=state)
    assert second.states[0].tokens == {0: [10, 11, 12]}
    assert second.engine.added["1/0"] == {"ids": [1, 2, 3], "n": 1, "generated": [[10, 11, 12]], "seed": 5}
    [last] = second.run([output("1/0", "c", ids=[13], reason="stop")])
    assert (last.body, last.last, last.state, last.headers) == (b"c", True, b"", None)


def test_finished_choices_are_not_resumed():
    setup = Setup(resume=True, n=2)
    setup.join(state=[encode_step({0: [10], 1: [20]}, {0}, seed=5)])
    assert [*setup.engine.added] == ["1/1"]
    [last] = setup.run([output("1/1", "x", reason="stop")])
    assert last.last


@pytest.mark.parametrize(("resume", "is_stream"), [(False, True), (True, False)])
def test_state_is_kept_only_for_streams_that_may_be_resumed(resume, is_stream):
    setup = Setup(resume=resume, is_stream=is_stream)
    setup.join()
    assert [part.state for part in setup.run([output("1/0", "a")])] == [b""]


def test_unreadable_state_fails_the_job(setup):
    with pytest.raises(RuntimeError, match="cannot be resumed"):
        setup.join(state=[b"nonsense"])
    assert setup.engine.added == {}


# ---- completions within a call ----


def test_completions_are_returned_in_the_order_of_their_prompts(setup):
    seen = []
    setup.engine.script = [
        [output("call-2", "y", reason="stop", ids=[8])],
        [output("call-1", "a"), output("call-1", "b", reason="length")],
    ]
    params = [SamplingParams(), SamplingParams()]
    completions = setup.generation.complete([[1], [2]], params, lambda i, ids: seen.append((i, ids)))
    assert [completion.text for completion in completions] == ["ab", "y"]
    assert seen == [(1, [8]), (0, [7]), (0, [7])]
    assert setup.engine.cancelled == ["call-1", "call-2"]


def test_jobs_advance_during_a_call_and_their_parts_go_to_on_results(setup):
    sent = []
    setup.generation.on_results = sent.extend
    setup.join()
    setup.engine.script = [[output("1/0", "a"), output("call-1", "x", reason="stop")]]
    setup.generation.complete([[1]], [SamplingParams()])
    assert [part.body for part in sent] == [b"a"]
    assert not setup.generation.has_work


def test_parts_made_during_a_call_without_on_results_come_with_the_next_step(setup):
    setup.join()
    setup.engine.script = [[output("1/0", "a"), output("call-1", "x", reason="stop")]]
    setup.generation.complete([[1]], [SamplingParams()])
    assert setup.generation.has_work
    assert [part.body for part in setup.generation.step()] == [b"a"]
    assert not setup.generation.has_work


def test_completion_that_ends_with_an_error_is_raised(setup):
    setup.engine.script = [[output("call-1", "", reason="error", error="NaN")]]
    with pytest.raises(PredictionException):
        setup.generation.complete([[1]], [SamplingParams()])


# ---- the rest ----


def test_generation_announces_the_engines_limits_and_closes_it(setup):
    generation = setup.generation
    assert (generation.places, generation.max_length, generation.abilities) == (4, 128, ("generate",))
    generation.close()
    assert setup.engine.is_closed
    with pytest.raises(NotImplementedError):
        generation.follow()


class RecordedMetrics:
    def __init__(self):
        self.values = {}

    def set_request_ids(self, request_ids):
        self.request_ids = request_ids

    def add_counter(self, name, value):
        self.values[name] = value

    def add_time(self, name, value):
        self.values[name] = value

    def add_percent(self, name, value):
        self.values[name] = value

    def add_metric(self, name, value, unit, *, metric_type):
        self.values[name] = value


def test_metrics_of_a_finished_job():
    metrics = RecordedMetrics()
    measure = GenerationMetrics(metrics)
    job = SimpleNamespace(request=Request(1, "r1", [], b""), counts=[COUNTS, COUNTS], began=1.0, first_at=1.5)
    measure(job, 2.0)
    assert metrics.request_ids == {0: "r1"}
    assert metrics.values == {
        "PromptTokens": 6,
        "CachedPromptTokens": 2,
        "GeneratedTokens": 4,
        "TimeToFirstToken": 500.0,
        "TokensPerSecond": 6.0,
        "DraftedTokens": 8,
        "AcceptedTokens": 2,
        "DraftAcceptance": 25.0,
    }


# ---- long requests ----


class SlowSetup(Setup):
    """Reading a long request waits until it may go on."""

    def __init__(self):
        super().__init__()
        self.may_go_on = threading.Event()
        self.order = []
        read = self.generation._read

        def read_slowly(request, row, state):
            assert len(request.body) < LONG_BYTES or self.may_go_on.wait(30)
            self.order.append(request.job_id)
            if request.job_id == 9:
                raise BadRequest("too long")
            return read(request, row, state)

        self.generation._read = read_slowly

    def join_long(self, job_id, size=LONG_BYTES, kind="generate", tenant=""):
        request = Request(job_id, f"r{job_id}", [], b"x" * size, kind, tenant=tenant)
        self.generation.join(request, {"body": request.body})

    def step_until(self, is_done):
        results = []
        deadline = time.monotonic() + 30
        while not is_done() and time.monotonic() < deadline:
            results += self.generation.step()
        assert is_done()
        return results


def test_long_request_is_read_beside_the_steps():
    setup = SlowSetup()
    setup.join_long(1)
    assert setup.generation.has_work
    assert setup.generation.step() == []
    assert setup.engine.added == {}
    setup.join_long(2, size=1)  # a short one does not wait for it
    setup.step_until(lambda: len(setup.engine.added) == 1)
    assert [*setup.engine.added] == ["2/0"]
    setup.may_go_on.set()
    setup.step_until(lambda: len(setup.engine.added) == 2)
    assert [*setup.engine.added] == ["2/0", "1/0"]
    assert not setup.generation.has_work
    setup.generation.close()


def test_long_requests_of_tenants_are_read_in_turns():
    setup = SlowSetup()
    for job_id in range(1, 5):
        setup.join_long(job_id, tenant="a")
    setup.join_long(5, tenant="b")
    setup.join_long(6, tenant="b")
    setup.may_go_on.set()
    setup.step_until(lambda: len(setup.engine.added) == 6)
    assert setup.order == [1, 5, 2, 6, 3, 4]
    setup.generation.close()


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_long_texts_do_not_wait_for_files_that_are_read(kind):
    """A video may take a minute to decode. Its place in the messages is before its file."""
    setup = SlowSetup()
    request = Generate(
        messages=[{"role": "user", "content": [{"type": kind}]}],
        files=[MediaInput("a", "x" * LONG_BYTES, kind="video" if kind == "video" else "sound")],
    )
    body = encode_request(request)
    setup.generation.join(Request(1, "r1", [], body, "generate"), {"body": body})
    setup.generation._read = Setup().generation._read  # reads at once
    setup.join_long(2)
    setup.step_until(lambda: "2/0" in setup.engine.added)
    assert [*setup.engine.added] == ["2/0"]
    setup.may_go_on.set()
    setup.step_until(lambda: "1/0" in setup.engine.added)
    setup.generation.close()


def test_long_prediction_is_read_beside_the_steps_unless_the_user_has_code_there():
    setup = SlowSetup()
    setup.join_long(1, kind="predict")
    assert setup.engine.added == {}
    setup.may_go_on.set()
    setup.step_until(lambda: len(setup.engine.added) == 1)
    setup.generation._has_own_read = lambda: True
    setup.join_long(2, kind="predict")
    assert [*setup.engine.added] == ["1/0", "2/0"]
    setup.generation.close()


def test_long_request_that_is_refused_fails_alone():
    setup = SlowSetup()
    setup.may_go_on.set()
    setup.join_long(9)
    [(job_id, error)] = setup.step_until(lambda: not setup.generation.has_work)
    assert (job_id, str(error)) == (9, "too long")
    setup.generation.close()


def test_long_request_that_is_cancelled_is_dropped():
    setup = SlowSetup()
    setup.join_long(1)
    setup.generation.cancel(1)
    assert not setup.generation.has_work
    setup.may_go_on.set()
    assert setup.engine.added == {}
    setup.generation.close()


def test_long_text_is_tokenized_beside_the_steps():
    setup = Setup()
    setup.generation._tokenize = bytes.upper
    assert setup.generation.tokenize(Request(1, "r", [], b"", "tokenize"), b"ab") == b"AB"
    assert setup.generation.tokenize(Request(2, "r", [], b"", "tokenize"), b"a" * LONG_BYTES) is None
    deadline, results = time.monotonic() + 30, []
    while not results and time.monotonic() < deadline:
        results = setup.generation.step()
    [part] = results
    assert (part.job_id, part.body, part.last) == (2, b"A" * LONG_BYTES, True)
    setup.generation.close()


# ---- images ----


class ImageSetup(Setup):
    """The requests with an odd job id have these images."""

    def __init__(self, *images, sounds=()):
        super().__init__()
        read = self.generation._read

        def read_with_images(request, row, state):
            files = ChatFiles(images=images, sounds=sounds) if request.job_id % 2 else ChatFiles()
            return replace(read(request, row, state), files=files)

        self.generation._read = read_with_images

    def step_until(self, is_done):
        results = []
        deadline = time.monotonic() + 30
        while not is_done() and time.monotonic() < deadline:
            results += self.generation.step()
        assert is_done()
        return results


def test_images_are_encoded_beside_the_steps_and_text_does_not_wait_for_them():
    setup = ImageSetup(MediaInput("first", "data:image/png;base64,YWI="), MediaInput("second", "https://x/y", b"cd"))
    setup.join(1)
    setup.join(2)
    assert [*setup.engine.added] == ["2/0"]
    assert setup.generation.has_work
    assert setup.generation.step() == []
    setup.engine.may_encode.set()
    setup.step_until(lambda: "1/0" in setup.engine.added)
    assert setup.engine.media == {"2/0": [], "1/0": [b"AB", b"CD"]}
    setup.generation.close()


@pytest.mark.parametrize("kind", ["sound", "video"])
def test_short_requests_with_files_that_may_be_long_are_read_beside_the_steps(kind):
    setup = Setup()
    body = encode_request(Generate(messages=[], files=[MediaInput("a", "data:,", kind=kind)]))
    setup.generation.join(Request(1, "r1", [], body, "generate"), {"body": body})
    assert "1/0" not in setup.engine.added
    setup.run()
    assert "1/0" in setup.engine.added


def test_sounds_are_encoded_behind_images():
    setup = ImageSetup(sounds=("a",))
    setup.engine.may_encode.set()
    setup.join(1)
    setup.run()
    assert setup.engine.media == {"1/0": ["sound a"]}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,YmFk", "is bad"),
        ("data:image/png;base64,no", "base64"),
        ("data:image/png,ab", "data URL"),
        ("https://x/y", "data URL"),
    ],
)
def test_an_image_that_cannot_be_read_fails_its_own_job_and_is_named(url, reason):
    setup = ImageSetup(MediaInput("messages[3].content[1]", url))
    setup.engine.may_encode.set()
    setup.join(1)
    [(job_id, error)] = setup.step_until(lambda: not setup.generation.has_work)
    assert job_id == 1
    assert isinstance(error, InvalidField)
    assert error.field == "messages[3].content[1]"
    assert "messages[3].content[1]" in str(error)
    assert reason in str(error)
    setup.generation.close()


def test_the_images_of_a_cancelled_job_are_dropped():
    setup = ImageSetup(MediaInput("first", "data:image/png;base64,YWI="))
    setup.join(1)
    setup.generation.cancel(1)
    assert not setup.generation.has_work
    setup.engine.may_encode.set()
    setup.generation._preparations._threads["prepare-files"]._executor.shutdown(wait=True)
    assert setup.engine.was_cancelled in ([], [True])
    assert setup.engine.added == {}
    setup.generation.close()


# ---- grammars ----


class GrammarSetup(ImageSetup):
    """Odd jobs have a grammar, which takes long to compile."""

    def __init__(self, structure):
        super().__init__()

        def read(request, row, state):
            params = SamplingParams(structured_outputs=structure if request.job_id % 2 else None)
            return Prompted(prompts=[[1]], params=params, reply=TextFormat(), is_stream=True)

        self.generation._read = read


def test_grammars_are_compiled_beside_the_steps_and_once():
    setup = GrammarSetup({"regex": "a+"})
    setup.join(1)
    setup.join(2)
    assert [*setup.engine.added] == ["2/0"]
    assert setup.generation.has_work
    setup.engine.may_compile.set()
    setup.step_until(lambda: "1/0" in setup.engine.added)
    setup.join(3)  # it is kept now
    assert "3/0" in setup.engine.added
    assert setup.engine.compiled == [{"regex": "a+"}]
    setup.generation.close()


def test_grammars_do_not_wait_for_files_that_are_encoded():
    setup = GrammarSetup({"regex": "a+"})
    read = setup.generation._read

    def read_with_image(request, row, state):
        image = MediaInput("first", "data:image/png;base64,YWI=")
        return replace(read(request, row, state), files=ChatFiles(images=[image] if request.job_id == 2 else []))

    setup.generation._read = read_with_image
    setup.engine.may_compile.set()
    setup.join(2)  # its image is not encoded yet
    setup.join(1)
    setup.step_until(lambda: "1/0" in setup.engine.added)
    assert "2/0" not in setup.engine.added
    setup.engine.may_encode.set()
    setup.step_until(lambda: "2/0" in setup.engine.added)
    setup.generation.close()


def test_a_grammar_that_cannot_be_enforced_fails_its_own_job_and_is_named():
    setup = GrammarSetup({"regex": "("})
    setup.engine.may_compile.set()
    setup.join(1)
    [(job_id, error)] = setup.step_until(lambda: not setup.generation.has_work)
    assert (job_id, error.field) == (1, "response_format")
    assert "cannot be enforced" in str(error)
    setup.generation.close()
