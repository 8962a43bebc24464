from __future__ import annotations

import random

import pytest

from flambeau.metrics.definitions import Definition
from flambeau.metrics.log_lines import MetricText, parse_line

DEFINITION = Definition("QueueTime", "gauge", "Milliseconds", ("Level", "Hostname"))


def test_lines_as_torchserve_writes_them():
    assert MetricText(DEFINITION, ("Host",), "vm").of_server(2, 17) == (
        "QueueTime.Milliseconds:2.0|#Level:Host|#hostname:vm,timestamp:17"
    )
    taken = Definition("PredictionTime", "gauge", "ms", ("ModelName", "Level"))
    assert MetricText(taken, ("m", "Model"), "vm").of_model(2.03, "a,b", 17) == (
        "PredictionTime.ms:2.03|#ModelName:m,Level:Model|#hostname:vm,requestID:a,b,timestamp:17"
    )


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        ("a.ms:1|#Level:Model|#type:GAUGE|#hostname:h,12,r-1", ("a", "gauge", "ms", 1.0, [("Level", "Model")], "r-1")),
        ("a b.ms:-1.5e-3|#|#hostname:h,12", ("a b", "counter", "ms", -0.0015, [], "")),
        (
            "a.Count:1,000|#x:1,y:b:c|#type:HISTOGRAM|#hostname:h,12,r,s",
            ("a", "histogram", "Count", 1000.0, [("x", "1"), ("y", "b:c")], "r,s"),
        ),
        ("Failed to update metric with name:x", None),
        ("a.ms:|#Level:Model|#hostname:h,12", None),
        ("a.ms:1.2.3|#Level:Model|#hostname:h,12", None),
        ("a.ms:1|#Level|#hostname:h,12", None),
        ("a.ms:1|#Level:Model|#type:SUMMARY|#hostname:h,12", None),
        ("", None),
    ],
)
def test_lines_that_handlers_print(line, sample):
    assert parse_line(line) == sample


def test_a_hostile_line_is_parsed_quickly():
    assert parse_line("a " * 50_000 + ".ms:1|#") is None


def test_labels_stay_on_their_line():
    line = MetricText(DEFINITION, ("a\nb\x1b",), "vm").of_server(2, 17)
    assert line == "QueueTime.Milliseconds:2.0|#Level:a\\nb\\x1b|#hostname:vm,timestamp:17"
    assert "\n" not in MetricText(DEFINITION, ("a",), "vm").of_model(2, "id\nid", 17)


def test_times_are_written_like_rounded_numbers():
    text = MetricText(DEFINITION, ("Host",), "vm")
    dice = random.Random(0)
    times = [0.0, 0.0004, 0.0005, 0.05, 2.0, 10.0, 100.0, 9.9996, *(10 ** dice.uniform(-5, 9) for _ in range(2000))]
    for value in times:
        assert text.of_time(value, 17) == text.of_server(round(value, 3), 17)
        assert text.of_prediction(value, "a", 17) == text.of_model(round(value, 2), "a", 17)
