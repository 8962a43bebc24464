from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from flambeau.config.server import ServerConfig
from flambeau.errors import ConfigError
from flambeau.logs.line_formats import ACCESS, MODEL, SERVER
from flambeau.torchserve.log4j import open_log4j_logs, read_log4j

XML = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
  <Properties><Property name="folder">${env:LOG_LOCATION:-logs}</Property></Properties>
  <Appenders>
    <RollingFile name="access_log" fileName="${folder}/who.log" filePattern="${folder}/who.%d{dd-MMM}.log.gz">
      <PatternLayout pattern="%d{ISO8601} - %m%n"/>
      <Policies><SizeBasedTriggeringPolicy size="20 MB"/><TimeBasedTriggeringPolicy/></Policies>
      <DefaultRolloverStrategy max="5"/>
    </RollingFile>
    <File name="all" fileName="${env:NOWHERE:-/var/log}/all.log"/>
    <Console name="STDOUT" target="SYSTEM_OUT"/>
    <Kafka name="k"/>
  </Appenders>
  <Loggers>
    <Logger name="ACCESS_LOG" level="info"><AppenderRef ref="access_log"/></Logger>
    <Logger name="org.pytorch.serve" level="debug"><AppenderRef ref="all"/></Logger>
    <Logger name="io.netty" level="error"/>
    <AsyncLogger name="MODEL_LOG" level="WARN"/>
    <Root level="info"><AppenderRef ref="STDOUT"/></Root>
  </Loggers>
</Configuration>
"""


def test_files_levels_and_sizes_are_kept_and_the_rest_is_named():
    settings, ignored = read_log4j(XML, {"LOG_LOCATION": "/srv/logs"})
    assert settings.files == {ACCESS: Path("/srv/logs/who.log"), SERVER: Path("/var/log/all.log")}
    assert settings.levels == {ACCESS: logging.INFO, SERVER: logging.DEBUG, MODEL: logging.WARNING}
    assert settings.has_console
    assert settings.max_bytes == 20 << 20
    assert ignored == ("Kafka", "PatternLayout (lines keep TorchServe's layout)", "Logger io.netty")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<Configuration", "not XML"),
        ("<html/>", "root is not <Configuration>"),
        ("", "not XML"),
        ('<!DOCTYPE c [<!ENTITY a "b">]><Configuration>&a;</Configuration>', "DOCTYPE"),
        ('<!DOCTYPE c SYSTEM "file:///etc/passwd"><Configuration/>', "DOCTYPE"),
        ("<Configuration>" + "<a>" * 100, "nested too deeply"),
        ("<Configuration>" + " " * (1 << 20), "larger than"),
        (XML.replace(":-/var/log", ""), r"\$\{env:NOWHERE\}, which is not set"),
    ],
)
def test_unreadable_files_are_rejected(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_log4j(text, {})


def test_the_logs_of_a_file_are_opened(tmp_path, caplog):
    (tmp_path / "log4j2.xml").write_text(XML.replace("${env:NOWHERE:-/var/log}", "${folder}"))
    config = replace(ServerConfig(), log_folder=tmp_path / "logs")
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        logs = open_log4j_logs(config, tmp_path / "log4j2.xml")
        logging.getLogger("flambeau.x").debug("told")
        logs.close()
    finally:
        logging.basicConfig(level=level, handlers=handlers, force=True)
        logging.getLogger("flambeau").setLevel(logging.NOTSET)
    text = (tmp_path / "logs" / "all.log").read_text()
    assert "told" in text
    assert "without effect here: Kafka, PatternLayout" in text
    assert (tmp_path / "logs" / "who.log").read_text() == ""
