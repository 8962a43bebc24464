"""Logs, snapshots and folders that fail, fill up, or are taken away."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from flambeau.config.server import KeysConfig
from scorecard.case import Case, Stage, handler_file
from scorecard.cases.processes import kill, pack_archive
from scorecard.probes import LatencyProbe, MemoryProbe, OwnAnswersClient, is_alive, wait_for
from support.archives import pack_handler
from support.command import Command
from support.running import RunningServer, free_ports, path


class PipedServer(RunningServer):
    """A server whose output goes to a pipe that nobody reads."""

    def __init__(self, folder: Path, *arguments: str | Path) -> None:
        self.port, self.management_port, self.metrics_port = free_ports(3)
        self.log_path = folder / "log"
        self.log_path.touch()
        ports = ["--port", self.port, "--management-port", self.management_port, "--metrics-port", self.metrics_port]
        command = [sys.executable, "-m", "flambeau.cli.main", "serve", *arguments, *ports]
        self.process = subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path()},
        )


def blocked_log_pipe(stage: Stage) -> None:
    words = [handler_file(word) for word in ("obedient.py", "echo.py")]
    server = PipedServer(stage.new_folder("piped"), *words, "--access-log")
    try:
        server.wait_ready()
        with MemoryProbe(server) as memory, LatencyProbe(server) as probe:
            order = {"do": "print", "n": stage.scale.of(1_000_000, 50_000), "line": "x" * 200}
            with OwnAnswersClient(server, connections=2) as others:
                status = server.predict("obedient", order, timeout=70).status
                time.sleep(1)
            memory.judge(stage, peak_mb=100, returns=False)  # the pipe stays full
        stage.equal("status of the request that printed", status, 200)
        others.judge(stage, refusals=False)
        probe.judge(stage)
    finally:
        server.process.send_signal(signal.SIGTERM)
        stopped_s = wait_for(lambda: server.process.poll() is not None, 20)
        if stopped_s is None:
            server.process.kill()
        assert server.process.stdout is not None
        server.process.stdout.close()
        server.process.wait()
    stage.within("stopped after SIGTERM within", stopped_s, 15)


def full_disk(stage: Stage) -> None:
    logs = stage.folder / "logs"
    server = stage.serve("echo.py", "--log-folder", logs)
    file = logs / "access_log.log"
    server.predict("echo", b"first", headers={"X-Request-Id": "first"})
    server.until(lambda: file.exists() and file.stat().st_size)
    limit = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    smallest = min(one.stat().st_size for one in logs.glob("*.log") if one.stat().st_size)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (smallest, limit[1]))  # as if the disk were full
    with OwnAnswersClient(server, connections=2, large_every=0) as client:
        time.sleep(2)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limit)
    client.judge(stage, refusals=False)
    again_s = wait_for(lambda: is_logged(server, file), 12)
    stage.within("the log goes on after", again_s, 12)


def log_folder_removed(stage: Stage) -> None:
    logs = stage.folder / "logs"
    server = stage.serve("echo.py", "--log-folder", logs)
    assert server.predict("echo", b"x").status == 200
    shutil.rmtree(logs)
    with OwnAnswersClient(server, connections=2) as client:
        time.sleep(1)
    client.judge(stage, refusals=False)
    again_s = wait_for(lambda: is_logged(server, logs / "access_log.log"), 12)
    stage.within("the log goes on after", again_s, 12)


def is_logged(server: RunningServer, file: Path) -> bool:
    """Whether a new request reaches the access log."""
    before = file.stat().st_size if file.exists() else 0
    server.predict("echo", b"again")
    time.sleep(0.2)
    return file.exists() and file.stat().st_size > before


def temporary_folder_emptied(stage: Stage) -> None:
    temporary = stage.new_folder("tmp")
    archive = pack_archive(stage, "obedient", "minWorkers: 1\nmaxWorkers: 1\n")
    server = stage.serve(archive, env={"TMPDIR": str(temporary)})
    [pid] = server.worker_pids("obedient")
    for entry in temporary.iterdir():  # as systemd-tmpfiles does after some days
        with suppress(OSError):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    kill(pid)
    answered_s = wait_for(lambda: is_answered(server), 20)
    stage.within("answers again after", answered_s, 15)
    scaled = server.manage("PUT", "/models/obedient?min_worker=2&max_worker=2&synchronous=true", timeout=40)
    stage.equal("status of scaling up", scaled.status, 200)


def is_answered(server: RunningServer) -> bool:
    try:
        return server.predict("obedient", {"do": "answer"}, timeout=5).status == 200
    except OSError:
        return False


def torn_snapshot(stage: Stage) -> None:
    command = stage.command()
    pack_handler(command.store, "echo")
    command.configure("enable_model_api=true", "metrics_mode=prometheus")
    command.started("--models", "echo.mar", "--ts-config", "config.properties")
    command.manage("PUT", "/models/echo?min_worker=2&max_worker=2&synchronous=true")
    command.stop_all()
    snapshots = command.snapshots()
    newest = snapshots[-1]
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    stage.note("snapshots", len(snapshots))
    is_started = restart(command)
    models = ", ".join(command.models()) if is_started else "the server did not start"
    stage.equal("models after a start from a torn snapshot", models, "echo")
    stage.at_least("lines of the log that name it", len(command.logged(newest.name)), 1)
    drafts = [file.name for file in newest.parent.iterdir() if not file.name.endswith(".cfg")]
    stage.none("drafts left in the snapshot folder", drafts)


def restart(command: Command) -> bool:
    """Start again; whether the server has started within 15 s."""
    command.log_path.unlink(missing_ok=True)
    command.start()
    return wait_for(lambda: "Model server started." in command.log, 15) is not None


def pid_file_link(stage: Stage) -> None:
    for kind, content in (("the id of a process", str(os.getpid())), ("a text", "precious"), ("nothing", None)):
        command = stage.command()
        pack_handler(command.store, "echo")
        victim = command.folder / "victim"
        if content is not None:
            victim.write_text(content)
        command.pid_file.symlink_to(victim)
        command.start("--models", "echo.mar", "--ncs")
        wait_for(lambda command=command: "Model server started." in command.log, 15)
        found = victim.read_text() if victim.exists() else None
        stage.equal(f"a link to a file with {kind}", str(found), str(content))
        pid = pid_listening(command.port)
        if pid is not None:  # the pid file may name another process: stop the server itself
            kill(pid, signal.SIGTERM)
            wait_for(lambda pid=pid: not is_alive(pid), 20)
        command.pid_file.unlink(missing_ok=True)


def pid_listening(port: int) -> int | None:
    """The process of this run that listens on a port of its own."""
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
            inodes.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) > 1:
            try:
                if any(os.readlink(link) in inodes for link in (folder / "fd").iterdir()):
                    return int(folder.name)
            except OSError:
                continue
    return None


def log_permissions(stage: Stage) -> None:
    logs = stage.folder / "logs"
    mask = os.umask(0o022)
    try:
        keys = KeysConfig(is_on=True, file=stage.folder / "keys.json")
        server = stage.configured("echo.py", log_folder=logs, keys=keys)
    finally:
        os.umask(mask)
    server.request("GET", "/ping")
    server.until(lambda: any(file.stat().st_size for file in logs.glob("*.log")))
    files = [*logs.rglob("*.log"), stage.folder / "keys.json"]
    stage.note("files", len(files))
    readable = [f"{file.name} {file.stat().st_mode & 0o777:o}" for file in files if file.stat().st_mode & 0o007]
    stage.none("files that everyone may read", readable)


def port_in_use(stage: Stage) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["serve", handler_file("echo.py"), "--port", port, "--management-port", 0, "--metrics-port", 0]
        result = subprocess.run(
            [sys.executable, "-m", "flambeau.cli.main", *map(str, words)], capture_output=True, text=True, timeout=60
        )
    stage.equal("exit status", result.returncode, 1)
    stage.equal("the message names the port", str(f":{port}" in result.stderr), "True")
    stage.equal("tracebacks", result.stderr.count("Traceback"), 0)


CASES = (
    Case(
        name="A log pipe that nobody reads",
        group="faults",
        promise="What waits to be logged is bounded; requests are answered; the server stops on SIGTERM.",
        run=blocked_log_pipe,
    ),
    Case(
        name="A full disk under the logs",
        group="faults",
        promise="Requests are answered; the log goes on when there is room again.",
        run=full_disk,
    ),
    Case(
        name="The log folder is removed",
        group="faults",
        promise="Requests are answered; the log goes on in a new file.",
        run=log_folder_removed,
    ),
    Case(
        name="The temporary folder is emptied",
        group="faults",
        promise="Archives are unpacked again: new workers start and requests are answered.",
        run=temporary_folder_emptied,
    ),
    Case(
        name="A torn snapshot",
        group="faults",
        promise="The snapshot before it is used, and the log says so.",
        run=torn_snapshot,
    ),
    Case(
        name="A link in place of the pid file",
        group="access",
        promise="The pid file does not follow links.",
        run=pid_file_link,
    ),
    Case(
        name="Permissions of logs and keys",
        group="access",
        promise="Logs and keys are not readable by everyone.",
        run=log_permissions,
    ),
    Case(
        name="A port in use",
        group="faults",
        promise="The server exits with a message that names the port.",
        run=port_in_use,
    ),
)
