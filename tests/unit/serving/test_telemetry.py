"""The log lines of a request with TorchServe's defaults: what they say, and that they stay cheap."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from flambeau.config.server import MetricsConfig
from flambeau.logs.access_log import AccessLog
from flambeau.logs.log_process import LogTargets
from flambeau.logs.setup import default_files
from flambeau.metrics.traffic import ModelTraffic
from flambeau.serving.telemetry import Telemetry
from flambeau.torchserve.log_messages import TorchServeEvents

NUM_REQUESTS = 100
# Python and C functions that the nine lines of one request may call. They call 44 and 79; when every line looked up
# its definition and its layout it was 104 and 143. One more call for each line exceeds the limits.
MAX_CALLS_TO_LOG = 51
MAX_CALLS_TO_WRITE = 86


class Request:
    """Logs what a request of one model logs, without a server."""

    def __init__(self, logs):
        telemetry = Telemetry(MetricsConfig(mode="log"), logs)
        self.host = telemetry.traffic
        self.model = ModelTraffic("m", self.host)
        self.access = AccessLog(logs)
        self.events = TorchServeEvents(logs)

    def __call__(self):
        counts = self.model.requested(None)
        self.events.batch_sent("W-9000-m_1.0")
        self.host.responded(200)
        self.access.http("/127.0.0.1:1", "POST", "/predictions/m", "", "1.1", 200, 0.0371)
        self.model.predicted(0.0123456, ["a-1"])
        self.model.answered(counts, 0.0371004, 0.0000498, 200)
        self.model.batch_done(1, 0.0005)


@pytest.fixture
def logs(tmp_path, monkeypatch):
    logs = LogTargets(console=None, files=default_files(tmp_path, tmp_path)).open(has_access_log=True)
    monkeypatch.setattr(logs, "_start", lambda: None)  # the test writes by itself
    yield logs
    logs.close()


def test_the_lines_of_a_request_in_their_order(logs, tmp_path):
    Request(logs)()
    logs._write_all()
    lines = (tmp_path / "ts_log.log").read_text().splitlines()
    host = Telemetry(MetricsConfig(), logs)._host
    end = lines[0].rpartition(":")[2]
    labels, whole = "|#model_name:m,model_version:default", f"|#Level:Host|#hostname:{host},timestamp:{end}"
    assert [line.partition("] ")[2] for line in lines] == [
        f"main TS_METRICS - ts_inference_requests_total.Count:1.0{labels}|#hostname:{host},timestamp:{end}",
        f"W-9000-m_1.0-stdout MODEL_LOG - Backend received inference at: {end}",
        f"main TS_METRICS - Requests2XX.Count:1.0{whole}",
        'main ACCESS_LOG - /127.0.0.1:1 "POST /predictions/m HTTP/1.1" 200 37',
        "main MODEL_METRICS - PredictionTime.ms:12.35|#ModelName:m,Level:Model"
        f"|#hostname:{host},requestID:a-1,timestamp:{end}",
        "main TS_METRICS - ts_inference_latency_microseconds.Microseconds:37100.4"
        f"{labels}|#hostname:{host},timestamp:{end}",
        f"main TS_METRICS - ts_queue_latency_microseconds.Microseconds:49.8{labels}|#hostname:{host},timestamp:{end}",
        f"main TS_METRICS - QueueTime.Milliseconds:0.05{whole}",
        f"main TS_METRICS - WorkerThreadTime.Milliseconds:0.5{whole}",
    ]
    short = (tmp_path / "access_log.log").read_text()
    assert short.partition(" - ")[2] == '/127.0.0.1:1 "POST /predictions/m HTTP/1.1" 200 37\n'


def count_calls(function):
    calls = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls["call"] + calls["c_call"]


def test_the_lines_of_a_request_take_few_calls(logs, tmp_path):
    request = Request(logs)
    request()
    logs._write_all()
    to_log = count_calls(lambda: [request() for _ in range(NUM_REQUESTS)])
    to_write = count_calls(logs._write_all)
    assert (tmp_path / "ts_log.log").read_text().count("\n") == 9 * (NUM_REQUESTS + 1)
    assert to_log / NUM_REQUESTS < MAX_CALLS_TO_LOG
    assert to_write / NUM_REQUESTS < MAX_CALLS_TO_WRITE


def test_times_logged_together_are_lines_of_their_own(logs, tmp_path):
    telemetry = Telemetry(MetricsConfig(mode="log"), logs)
    telemetry.times_together(("QueueTime", ("Host",)), ("not defined", ()), ("WorkerThreadTime", ("Host",)))(
        1.5, 2.0, 3.25
    )
    telemetry.times_together(("not defined", ()))(4.0)
    logs._write_all()
    lines = (tmp_path / "ts_metrics.log").read_text().splitlines()
    assert [line.partition(" - ")[2].partition("|")[0] for line in lines] == [
        "QueueTime.Milliseconds:1.5",
        "WorkerThreadTime.Milliseconds:3.25",
    ]


def test_every_dropped_line_of_a_group_is_counted(logs, monkeypatch):
    monkeypatch.setattr("flambeau.logs.writer.MAX_WAITING_BYTES", 0)
    telemetry = Telemetry(MetricsConfig(mode="log"), logs)
    telemetry.times_together(("QueueTime", ("Host",)), ("WorkerThreadTime", ("Host",)))(1.0, 2.0)
    assert logs.num_dropped == 2
