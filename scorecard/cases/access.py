"""Who gets in: keys, web pages on other sites, URLs, forged metrics, templates."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from flambeau.config.server import KeysConfig, MetricsConfig
from scorecard.case import Case, NotHere, Stage
from scorecard.probes import LatencyProbe, MemoryProbe
from support.archives import pack_handler
from support.file_server import serving_files

METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH")
OPEN_PATHS = ("/livez", "/readyz", "/startupz", "/api-description")  # and the description itself


def foreign_hosts(stage: Stage) -> None:
    store = stage.new_folder("store")
    pack_handler(store, "echo", name="other")
    server = stage.serve("echo.py", "--model-store", store)
    ports = {"inference": server.port, "management": server.management_port, "metrics": server.metrics_port}
    targets = [
        ("inference", "POST", "/predictions/echo"),
        ("inference", "GET", "/v1/models"),
        ("management", "GET", "/models"),
        ("management", "POST", "/models?url=other.mar"),
        ("management", "PUT", "/models/echo?min_worker=2"),
        ("metrics", "GET", "/metrics"),
    ]
    let_in, shut_out, num_tries = [], [], 0
    for listener, method, target in targets:
        port = ports[listener]
        for headers in (
            {"Host": "attacker.com"},
            {"Host": f"attacker.com:{port}"},
            {"Host": "127.0.0.1.attacker.com"},
            {"Host": f"127.0.0.1:{port}", "Origin": "https://attacker.com"},
            {"Host": f"localhost:{port}", "Origin": "null"},
            {"Host": f"127.0.0.1:{port}", "Origin": "http://127.0.0.1.attacker.com"},
        ):
            reply = server.request(method, target, b"{}" if method == "POST" else None, headers, port=port)
            num_tries += 1
            if reply.status < 400:
                let_in.append(f"{method} {target} with {headers}: {reply.status}")
    for host in ("127.0.0.1", "localhost", f"127.0.0.1:{server.port}", f"localhost:{server.port}", "[::1]"):
        reply = server.request("POST", "/predictions/echo", b"x", {"Host": host})
        if reply.status != 200:
            shut_out.append(f"Host {host}: {reply.status}")
    stage.note("requests with a foreign Host or Origin", num_tries)
    stage.none("foreign requests that were let in", let_in)
    stage.none("local requests that were refused", shut_out)


def routes_without_key(stage: Stage) -> None:
    folder = stage.new_folder("keys")
    server = stage.configured("echo.py", keys=KeysConfig(is_on=True, file=folder / "keys.json"))
    keys = json.loads((folder / "keys.json").read_text())
    wrong = {"inference": keys["management"]["key"], "management": keys["inference"]["key"]}
    let_in, num_tries = [], 0
    for listener, port in (("inference", server.port), ("management", server.management_port)):
        document = server.request("OPTIONS", "/", port=port).json
        paths = [path.replace("{model_name}", "echo").replace("{model_version}", "1.0") for path in document["paths"]]
        for path in [*paths, "/v1/models", "/v1/chat/completions", "/v2", "/models", "/ping", "/nowhere", "/workflows"]:
            if path in ("/", *OPEN_PATHS):
                continue
            for method in METHODS:
                for key in (None, "x", wrong[listener], keys["API"]["key"]):
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    body = b"{}" if method in ("POST", "PUT") else None
                    reply = server.request(method, path, body, headers, port=port)
                    num_tries += 1
                    if reply.status < 400 and method != "OPTIONS":
                        let_in.append(f"{listener} {method} {path}: {reply.status}")
    stage.note("calls with no key or a wrong one", num_tries)
    stage.none("calls that were let in", let_in)


def keys_in_environment(stage: Stage) -> None:
    folder = stage.new_folder("keys")
    secrets = {
        "FLAMBEAU_MANAGEMENT_KEY": "management-key-value" + "x" * 32,
        "FLAMBEAU_INFERENCE_KEY": "inference-key-value" + "x" * 32,
        "FLAMBEAU_API_KEY": "api-key-value" + "x" * 32,
    }
    server = stage.configured("obedient.py", keys=KeysConfig(is_on=True, file=folder / "keys.json"), env=secrets)
    keys = json.loads((folder / "keys.json").read_text())
    headers = {"Authorization": "Bearer " + keys["inference"]["key"]}
    reply = server.predict("obedient", {"do": "environment"}, headers=headers)
    assert reply.status == 200, reply.text
    values = [entry["key"] for entry in keys.values() if isinstance(entry, dict)] + [*secrets.values()]
    environment = "\n".join(f"{name}={value}" for name, value in reply.json.items())
    names = [line.partition("=")[0] for line in environment.splitlines() if any(value in line for value in values)]
    stage.none("variables of a worker with a key of the server", names)


def encoded_urls(stage: Stage) -> None:
    store, secret = stage.new_folder("store"), stage.new_folder("secret")
    allowed = stage.new_folder("allowed")
    archive = pack_handler(secret, "echo", name="stolen")
    with serving_files() as web:
        web.files["/secret/stolen.mar"] = archive.read_bytes()
        for path in ("/allowed/../secret/stolen.mar", "/allowed/%2e%2e/secret/stolen.mar"):
            web.files[path] = archive.read_bytes()
        patterns = [rf"file://{allowed}/.*", rf"{web.url}/allowed/.*"]
        server = stage.configured("echo.py", model_store=store, allowed_urls=patterns, allow_private_urls=True)
        dots = ("..", "%2e%2e", "%2E.", ".%2e", "%252e%252e", "..%2f..", "%2e%2e%2f", "..;", "..\\")
        let_in = []
        for dot in dots:
            for url in (
                f"file://{allowed}/{dot}/{secret.name}/stolen.mar",
                f"file://{allowed}/x/{dot}/{dot}/{secret.name}/stolen.mar",
                f"{web.url}/allowed/{dot}/secret/stolen.mar",
            ):
                reply = server.register(url, model_name="stolen")
                if reply.status < 400:
                    let_in.append(url.rpartition("allowed")[2])
                    server.manage("DELETE", "/models/stolen")
                elif reply.status >= 500:
                    let_in.append(f"{reply.status} for {dot}")
        asked = [path for path in web.asked if "secret" in path]
    stage.note("spellings of a way out", 3 * len(dots))
    stage.none("urls that left the allowed folder", let_in)
    stage.none("requests that reached the other server", asked)


def forged_metrics(stage: Stage) -> None:
    measure = MetricsConfig(auto_detect=True)
    server = stage.configured("obedient.py", measure=measure)
    line = "[METRICS]forgedNUMBER.Count:1|#Level:Model|#type:GAUGE|#hostname:x,1700000000,id"
    with MemoryProbe(server) as memory, LatencyProbe(server) as probe:
        for kind in (line, line.replace("Level:Model", "Level:NUMBER").replace("forgedNUMBER", "forged_labels")):
            order = {"do": "print", "n": stage.scale.of(100_000, 5000), "line": kind}
            assert server.predict("obedient", order, timeout=60).status == 200
        time.sleep(2)
        memory.judge(stage, peak_mb=100)
    text = server.request("GET", "/metrics", port=server.metrics_port).text
    forged = [name for name in metric_names(server) if name.startswith("forged")]
    stage.at_most("forged metric names", len(forged), 1000)
    stage.at_most("series of one forged name", text.count("forged_labels{"), 10_000)
    probe.judge(stage)


def metric_names(server: Any) -> set[str]:
    text = server.request("GET", "/metrics", port=server.metrics_port).text
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}


BOMBS = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "repeat": "{{ 'x' * 10 ** 10 }}",
    "modulo": "{{ '%01000000000d' % 1 }}",
    "modulo in a loop": "{% for i in range(5000) %}{{ '%0100000d' % i }}{% endfor %}",
    "format filter": "{{ '%01000000000d' | format(1) }}",
    "format method": "{{ '{:01000000000d}'.format(1) }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "center method": "{{ 'x'.center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "replace": "{% set x = 'a' * 50000 %}{{ x.replace('a', x) }}",
    "replace filter": "{% set x = 'a' * 50000 %}{{ x | replace('a', x) }}",
    "join": "{% set x = 'a' * 50000 %}{{ x.join(x) }}",
    "join filter": "{% set x = 'a' * 50000 %}{{ (x | list) | join(x) }}",
    "indent": "{% set x = '\n' * 50000 %}{{ x | indent(50000, true) }}",
    "expandtabs": "{{ ('\t' * 50000).expandtabs(100000) }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list | length }}",
    "slice": "{{ [1] | slice(1000000000) | list | length }}",
    "wordwrap": "{% set x = 'a ' * 50000 %}{{ x | wordwrap(1, wrapstring=x) }}",
    "sort": "{% for i in range(9000) %}{% set y = range(9000) | sort %}{% endfor %}",
    "list in a loop": "{% for i in range(9000) %}{% set y = range(9000) | list %}{% endfor %}",
    "list sum": "{{ (range(9000) | list) * 1000000 }}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "tojson": "{% set x = ['a' * 50000] * 1000 %}{% for i in range(1000) %}{{ x | tojson | length }}{% endfor %}",
    "map": "{% for i in range(9000) %}{{ range(9000) | map('string') | list | length }}{% endfor %}",
    "split": "{% for i in range(9000) %}{{ ('a ' * 40000).split() | length }}{% endfor %}",
    "encode": "{% for i in range(90000) %}{{ ('é' * 90000).encode() | length }}{% endfor %}",
    "title": "{% for i in range(90000) %}{{ ('é ' * 90000) | title | length }}{% endfor %}",
    "comparison": "{% set x = range(99999) | list %}{% for i in range(9999) %}{{ x == x[:] }}{% endfor %}",
}
RENDER = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from flambeau.llm.errors import InvalidRequest, TokenizerError
from flambeau.llm.text.chat_template import ChatTemplate
source, before, began = sys.stdin.read(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
try:
    text = ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "x"}])
    outcome = f"rendered {len(text)} characters" if len(text) > 1_000_000 else "stopped"
except (InvalidRequest, TokenizerError) as error:
    outcome = "memory was exhausted" if "MemoryError" in str(error) else "stopped"
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(f"{outcome}|{time.monotonic() - began}|{(after - before) / 1024}")
"""


def template_bombs(stage: Stage) -> None:
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise NotHere("needs jinja2") from None
    names = [*BOMBS][:: stage.scale.of(1, 6)]
    with ThreadPoolExecutor(2) as pool:
        renderings = dict(zip(names, pool.map(render_bomb, names), strict=True))
    trouble = [f"{name}: {found}" for name, found in renderings.items() if isinstance(found, str)]
    stopped = [found for found in renderings.values() if not isinstance(found, str)]
    stage.note("templates", len(names))
    stage.none("templates that took more than 5 s or 200 MB", trouble)
    stage.note("slowest of the others", max((seconds for seconds, _ in stopped), default=0.0), "s")
    stage.note("most memory of the others", max((megabytes for _, megabytes in stopped), default=0.0), "MB")


def render_bomb(name: str) -> tuple[float, float] | str:
    """Seconds and megabytes until the template was stopped, or what is wrong."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", RENDER], input=BOMBS[name], capture_output=True, text=True, timeout=10
        )
    except subprocess.TimeoutExpired:
        return "runs after 10 s"
    if result.returncode:
        return f"ended with {result.returncode}: {result.stderr.strip().splitlines()[-1:]}"
    outcome, seconds, megabytes = result.stdout.strip().split("|")
    if outcome != "stopped" or float(seconds) > 5 or float(megabytes) > 200:
        return f"{outcome}, {float(seconds):.1f} s, {float(megabytes):.0f} MB"
    return float(seconds), float(megabytes)


def log_forging(stage: Stage) -> None:
    logs = stage.folder / "logs"
    server = stage.serve("echo.py", "--log-folder", logs)
    forged = "\r\n2026-01-01T00:00:00,000 [ERROR] forged line"
    server.request("GET", "/predictions/" + quote(f"nobody{forged}"))
    server.request("GET", "/ping", headers={"User-Agent": "x\tforged line"})
    server.manage("POST", "/models?url=" + quote(f"x{forged}.mar"))
    server.until(lambda: (logs / "access_log.log").read_text().count("\n") >= 3)
    lines = [line for file in logs.glob("*.log") for line in file.read_text(errors="replace").splitlines()]
    stage.none("log lines that a client made up", [line for line in lines if line.startswith("2026-01-01")])


CASES = (
    Case(
        name="Foreign Host and Origin on loopback",
        group="access",
        promise="Without keys, a web page of another site can neither call nor read the APIs.",
        run=foreign_hosts,
    ),
    Case(
        name="Routes without the right key",
        group="access",
        promise="With keys on, no path answers without its own key but probes and descriptions.",
        run=routes_without_key,
    ),
    Case(
        name="Keys in a worker's environment",
        group="access",
        promise="A handler does not find a key of the server among its variables.",
        run=keys_in_environment,
    ),
    Case(
        name="Encoded dots in allowed URLs",
        group="access",
        promise="No spelling of `..` leaves what allowed_urls allows.",
        run=encoded_urls,
    ),
    Case(
        name="Forged metric names",
        group="access",
        promise="Printed lines cannot add names or series without bound.",
        run=forged_metrics,
    ),
    Case(
        name="Template bombs",
        group="access",
        promise="A chat template is stopped within 5 s and 200 MB, whatever it calls.",
        run=template_bombs,
        limit_s=300,
    ),
    Case(
        name="Forged log lines",
        group="access",
        promise="Clients cannot add lines to a log.",
        run=log_forging,
    ),
)
