"""Stages are timed and described, and their times add up."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

import numpy
import pytest
import torch
from PIL import Image

from flambeau.cli.output import median_call, stage_rows
from flambeau.worker.loader import LoadedHandler
from flambeau.worker.stage_timings import CallProfile, Stage, StageObserver, describe, device_of, size_text


class Staged:
    def preprocess(self, data):
        time.sleep(0.02)
        return [b"xx" for _ in data]

    def inference(self, data):
        time.sleep(0.04)
        return {"n": len(data)}

    def postprocess(self, data):
        return ["a"] * data["n"]

    def handle(self, data, context):
        time.sleep(0.01)
        return self.postprocess(self.inference(self.preprocess(data)))


def observed(handler) -> tuple[StageObserver, LoadedHandler]:
    observer = StageObserver()
    return observer, observer.observe(LoadedHandler(handler.handle, False, handler))


def test_each_stage_has_its_output_and_its_own_time():
    observer, entry = observed(Staged())
    observer.begin()
    began = time.perf_counter()
    assert entry.handle([1, 2], None) == ["a", "a"]
    elapsed = time.perf_counter() - began
    stages = observer.call.stages
    assert [(stage.name, stage.output) for stage in stages] == [
        ("preprocess", "list of 2 bytes"),
        ("inference", "dict of 1 (n)"),
        ("postprocess", "list of 2 str"),
    ]
    assert stages[0].seconds >= 0.02
    assert stages[1].seconds >= 0.04
    assert observer.call.rest.seconds >= 0.01
    assert 0.07 <= observer.call.seconds <= elapsed


def test_time_of_a_stage_inside_a_stage_is_counted_once():
    class Nested(Staged):
        def preprocess(self, data):
            self.inference(data)
            return super().preprocess(data)

    observer, entry = observed(Nested())
    began = time.perf_counter()
    entry.handle([1], None)
    elapsed = time.perf_counter() - began
    by_name = {stage.name: stage for stage in observer.call.stages}
    assert by_name["inference"].calls == 2
    assert by_name["preprocess"].seconds + by_name["inference"].seconds <= elapsed
    assert 0.11 <= observer.call.seconds <= elapsed


def test_next_call_begins_at_zero():
    observer, entry = observed(Staged())
    for _ in range(2):
        observer.begin()
        entry.handle([1], None)
    assert [stage.calls for stage in observer.call.stages] == [1, 1, 1]


class Waiting(Staged):
    async def inference(self, data):
        await asyncio.sleep(0.03)
        return {"n": len(data)}

    async def handle(self, data, context):
        return self.postprocess(await self.inference(self.preprocess(data)))


async def test_stages_of_async_handlers_are_awaited():
    observer, entry = observed(Waiting())
    assert await entry.handle([1], None) == ["a"]
    assert {s.name: s.seconds for s in observer.call.stages}["inference"] >= 0.03


def test_time_of_a_stream_is_that_of_its_items():
    class Streaming:
        def handle(self, data, context):
            for _ in range(3):
                time.sleep(0.01)
                yield "x"

    observer, entry = observed(Streaming())
    assert [*entry.handle([1], None)] == ["x", "x", "x"]
    assert observer.call.seconds >= 0.03


def test_handler_without_all_stages_or_without_room_is_timed_as_a_whole():
    class Partly:
        def preprocess(self, data):
            return data

        def handle(self, data, context):
            return self.preprocess(data)

    class Full:
        __slots__ = ()
        preprocess = Staged.preprocess
        inference = Staged.inference
        postprocess = Staged.postprocess
        handle = Staged.handle

    for handler in (Partly(), Full()):
        observer, entry = observed(handler)
        entry.handle([1], None)
        assert observer.call.stages == []
        assert observer.call.rest.calls == 1


def test_table_adds_up_in_every_column():
    first = CallProfile(
        [Stage("preprocess", 0.5, 1, "x"), Stage("inference", 1.0, 1, "y")], Stage("rest of handle", 0.25)
    )
    later = CallProfile(
        [Stage("preprocess", 0.1, 1, "x"), Stage("inference", 0.2, 2, "z")], Stage("rest of handle", 0.05)
    )
    rows = stage_rows([first, later])
    assert [row.name for row in rows] == ["preprocess", "inference ×2", "rest of handle", "handle"]
    for column in range(2):
        *parts, whole = (row.times_ms[column] for row in rows)
        assert sum(parts) == pytest.approx(whole)
    assert rows[-1].times_ms == pytest.approx((1750, 350))


def test_median_is_a_real_call():
    calls = [CallProfile([], Stage("rest of handle", seconds)) for seconds in (9.0, 1.0, 2.0, 3.0)]
    assert median_call(calls) is calls[2]


def test_device_is_shown_if_it_is_known():
    import torch

    class WithModel:
        model = torch.nn.Linear(1, 1)

    class Odd:
        class model:  # noqa: N801
            @staticmethod
            def parameters():
                raise OSError

    assert device_of(WithModel()) == "cpu"
    assert device_of(Odd()) == ""
    assert device_of(object()) == ""
    assert device_of(type("Told", (), {"device": "cuda:1"})()) == "cuda:1"


TENSOR = torch.zeros(2, 3)
OTHER = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, 3, 224, 224), "Tensor float32 (2, 3, 224, 224) cpu"),
        (numpy.zeros((2, 3), numpy.uint8), "ndarray uint8 (2, 3) cpu"),
        ([{}, {}], "list of 2 dict"),
        ([1, "a"], "list of 2 (int, str)"),
        ([], "list of 0"),
        ([TENSOR, TENSOR], "list of 2 Tensor float32 (2, 3) cpu"),
        ([TENSOR, OTHER], "list of 2 Tensor"),
        ((TENSOR, None), "tuple of 2 (NoneType, Tensor)"),
        (bytearray(13_200), "bytearray 13.2 kB"),
        (b"", "bytes 0 B"),
        ("four", "str of 4 characters"),
        (None, "None"),
        (True, "bool True"),
        (0.5, "float 0.5"),
        ({"ids": TENSOR, "mask": OTHER}, "{ids: Tensor float32 (2, 3) cpu, mask: Tensor int64 (4,) cpu}"),
        ({"deep": {"ids": OTHER}, "n": 1}, "{deep: {ids: Tensor int64 (4,) cpu}, n: int 1}"),
        (OrderedDict(ids=OTHER), "OrderedDict {ids: Tensor int64 (4,) cpu}"),
        ({"a": 1, "b": [2]}, "dict of 2 (a, b)"),
        ({}, "dict of 0"),
        ({i: i for i in range(9)}, "dict of 9 (0, 1, 2, 3, 4, 5, …)"),
        (Image.new("RGB", (5, 4)), "Image RGB 5×4"),
        (object(), "object"),
    ],
)
def test_values_are_described(value, words):
    assert describe(value) == words


@pytest.mark.parametrize(
    ("size", "text"), [(999, "999 B"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (7 * 10**12, "7000.0 GB")]
)
def test_sizes_have_a_unit(size, text):
    assert size_text(size) == text


def test_mappings_in_mappings_come_to_an_end():
    value: dict[str, object] = {"x": TENSOR}
    for _ in range(50):
        value = {"inner": value, "x": TENSOR}
    assert len(describe(value)) < 400
