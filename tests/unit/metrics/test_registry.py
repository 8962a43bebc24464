from __future__ import annotations

from types import SimpleNamespace

import pytest

from flambeau.metrics.registry import Metrics
from flambeau.metrics.samples import MetricSamples


def test_counters_add_gauges_replace_histograms_count():
    metrics = Metrics()
    metrics.add_samples(
        [
            ("c", "counter", "Count", 1, [("a", 'q"x')]),
            ("c", "counter", "Count", 2, [("a", 'q"x')]),
            ("g", "gauge", "ms", 1, []),
            ("g", "gauge", "ms", 5, []),
            ("h", "histogram", "ms", 0.3, []),
            ("h", "histogram", "ms", 9999, []),
        ]
    )
    lines = metrics.text().splitlines()
    assert r'c{a="q\"x"} 3' in lines
    assert "g 5" in lines
    assert 'h_bucket{le="0.5"} 1' in lines
    assert 'h_bucket{le="+Inf"} 2' in lines
    assert "h_count 2" in lines
    assert "# TYPE h histogram" in lines


def test_names_are_made_fit_for_prometheus():
    metrics = Metrics()
    metrics.add_samples([("9 lives!", "gauge", "", 1, [("a-b", "x")])])
    assert '_9_lives_{a_b="x"} 1' in metrics.text()


def test_handlers_measure_by_name():
    samples = MetricSamples("m")
    samples.add_time("t", 1.5, dimensions=[SimpleNamespace(name="Level", value="Mine")])
    samples.add_size("s", 2, unit="kB")
    samples.add_percent("p", 50)
    samples.add_error("e", 1)
    taken = samples.take()
    assert taken[0] == ("t", "gauge", "Milliseconds", 1.5, [("Level", "Mine"), ("ModelName", "m")])
    assert [sample[2] for sample in taken] == ["Milliseconds", "Kilobytes", "Percent", "unit"]
    assert samples.take() == []
    with pytest.raises(ValueError, match="ms or s"):
        samples.add_time("t", 1, unit="h")
    with pytest.raises(ValueError, match="MB, kB, GB or B"):
        samples.add_size("t", 1, unit="h")
