"""The host's state, read by the server or by a configured command."""

from __future__ import annotations

import os
import sys

from flambeau.config.server import MetricsConfig
from flambeau.logs.writer import Logs
from flambeau.serving.server_metrics import HostMetricsReader, parse_output
from flambeau.serving.telemetry import Telemetry
from support.fake_workers import until

SCRIPT = """
import sys
print("CPUUtilization.Percent:12.5|#Level:Host|#hostname:h,1")
print("GPUUtilization.Percent:7|#Level:Host,device_id:1|#hostname:h,1")
print("NotNamed.Percent:7|#Level:Host|#hostname:h,1")
print(flush=True)
for pid in sys.stdin.readline().split(","):
    print(f"{pid.strip()}:4096")
"""


async def watch(config, condition):
    """Run a reader until a condition of the metrics text holds, and return that text."""
    telemetry = Telemetry(config, Logs())
    reader = HostMetricsReader(config, telemetry, lambda: [12, 34])
    reader.start()
    await until(lambda: condition(telemetry.text([], [], [])))
    await reader.stop()
    return telemetry.text([], [], [])


def reasons(caplog):
    """Why the metrics could not be read, each time."""
    records = [record for record in caplog.records if record.name == "flambeau.serving.server_metrics"]
    assert {record.levelname for record in records} <= {"ERROR"}
    return [record.args[0] for record in records]


async def test_the_host_is_read_periodically():
    text = await watch(MetricsConfig(interval_s=0.05), lambda text: "CPUUtilization{" in text and "MemoryUsed{" in text)
    assert "DiskAvailable{" in text


async def test_a_command_provides_the_metrics(tmp_path):
    (tmp_path / "collect.py").write_text(SCRIPT)
    command = f"{sys.executable} {tmp_path / 'collect.py'}"
    config = MetricsConfig(interval_s=0.05, system_command=command)
    text = await watch(config, lambda text: "CPUUtilization{" in text)
    host = os.uname().nodename
    assert f'CPUUtilization{{Level="Host",Hostname="{host}",}} 12.5' in text
    assert f'GPUUtilization{{Level="Host",DeviceId="1",Hostname="{host}",}} 7.0' in text
    assert "NotNamed" not in text
    assert "MemoryUsed{" not in text


async def test_a_failed_command_is_logged_and_retried(tmp_path, caplog):
    (tmp_path / "collect.py").write_text("raise SystemExit(3)")
    config = MetricsConfig(interval_s=0.01, system_command=f"{sys.executable} {tmp_path / 'collect.py'}")
    await watch(config, lambda _: len(reasons(caplog)) > 1)
    assert {type(reason) for reason in reasons(caplog)} == {OSError}  # the exit status
    caplog.clear()
    config = MetricsConfig(interval_s=0.01, system_command="/no/such/command")
    await watch(config, lambda _: len(reasons(caplog)) > 1)
    assert {type(reason) for reason in reasons(caplog)} == {FileNotFoundError}


async def test_nothing_is_read_when_system_metrics_are_off():
    text = await watch(MetricsConfig(system=False, interval_s=0.01), lambda _: True)
    assert "CPUUtilization{" not in text


async def test_a_command_that_prints_without_end_is_ended(caplog):
    config = MetricsConfig(interval_s=0.05, system_command="yes")
    await watch(config, lambda _: reasons(caplog))
    assert {type(reason) for reason in reasons(caplog)} == {ValueError}


def test_the_output_of_a_command_is_parsed(caplog):
    lines = ["CPUUtilization.Percent:12.5|#Level:Host|#hostname:h,1", "noise", ""]
    lines += ["GPUUtilization.Percent:1|#Level:Host,device_id:3|#hostname:h,1", "12:4096", "x:y"]
    readings = parse_output([lines[3], *lines[:3], *lines[4:]])
    assert readings == [("GPUUtilization", "Percent", 1.0, "3"), ("CPUUtilization", "Percent", 12.5, None)]
    assert [record.args for record in caplog.records] == [("noise",)]
