"""The files of deploy/: well-formed, and consistent with each other and with the server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from flambeau.config.settings import EVERY
from support.snippets import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "flambeau"
TEMPLATES = sorted((CHART / "templates").glob("*"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
SETTINGS = {setting.name for setting in EVERY}
MANIFESTS = sorted((DEPLOY / "kserve").glob("*.yaml"))


def test_dockerfile_passes_hadolint():
    program = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([program, DEPLOY / "docker" / "Dockerfile"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_images_run_as_an_ordinary_user_and_get_every_file_they_copy():
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    for target in ("cpu", "cuda"):
        stage = text.partition(f"AS {target}\n")[2].partition("\nFROM ")[0]
        assert stage.rstrip().endswith("USER 1000")
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for word in line.split()}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_extras_of_the_images_exist():
    extras = set(re.findall(r"^ARG EXTRAS=(\S+)$", (DEPLOY / "docker" / "Dockerfile").read_text(), re.M)[0].split(","))
    project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert extras <= set(re.findall(r"^(\w+) = \[", project, re.M))


def test_compose_mounts_files_that_exist_and_stops_after_the_drain():
    folder = DEPLOY / "compose"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (folder / source).exists(), source
    server = compose["services"]["flambeau"]
    assert int(server["stop_grace_period"][:-1]) > server["environment"]["FLAMBEAU_DRAIN_TIMEOUT"]
    assert (folder / server["build"]["context"]).resolve() == ROOT
    assert all(address.startswith("127.0.0.1:") for one in compose["services"].values() for address in one["ports"])
    variables = {name for name in server["environment"] if name.startswith("FLAMBEAU_") and not name.endswith("_KEY")}
    assert variables <= {f"FLAMBEAU_{name.upper()}" for name in SETTINGS}
    scraped = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0]
    assert scraped["targets"] == ["flambeau:8082"]


# ---- the chart ----


def test_values_follow_their_schema():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate({**VALUES, "replica": 2}, SCHEMA)


def test_settings_of_the_chart_are_settings_of_the_server():
    assert set(VALUES["config"]) <= SETTINGS


def test_templates_use_values_and_definitions_that_exist():
    used, defined, included = set(), set(), set()
    for template in TEMPLATES:
        text = template.read_text()
        used |= set(re.findall(r"\.Values\.([\w.]+)", text))
        defined |= set(re.findall(r'define "([\w.]+)"', text))
        included |= set(re.findall(r'include "([\w.]+)"', text))
    for name in used:
        find(VALUES, name)
    assert included == defined
    assert {name.split(".")[0] for name in used} == set(VALUES), "a value that no template reads"


def find(values: Any, name: str) -> Any:
    for word in name.split("."):
        values = values[word]
    return values


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_blocks_of_a_template_are_closed(template):
    depth = 0
    for word in re.findall(r"\{\{-? *(if|range|with|define|else|end)\b", template.read_text()):
        depth += {"end": -1, "else": 0}.get(word, 1)
        assert depth >= 0
    assert depth == 0


def test_grace_period_of_the_pod_is_longer_than_sleep_and_drain():
    text = (CHART / "templates" / "deployment.yaml").read_text()
    assert (
        "terminationGracePeriodSeconds: {{ add .Values.preStopSleep (ceil .Values.config.drain_timeout) 10 }}" in text
    )


# ---- KServe ----


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_container_of_a_runtime_is_one_that_a_pod_accepts(path):
    """KServe's own resources have no public schema here; their containers and volumes are those of a pod."""
    runtime, service = yaml.safe_load_all(path.read_text())
    spec = {key: runtime["spec"][key] for key in ("containers", "volumes") if key in runtime["spec"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(pod, "1.32", strict=True)
    assert runtime["kind"] == "ClusterServingRuntime"
    assert [one["name"] for one in spec["containers"]] == ["kserve-container"]
    formats = {one["name"] for one in runtime["spec"]["supportedModelFormats"]}
    assert service["spec"]["predictor"]["model"]["modelFormat"]["name"] in formats


def test_every_alert_has_a_test_that_makes_it_fire():
    rules = yaml.safe_load((DEPLOY / "grafana" / "alerts.yaml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((DEPLOY / "grafana" / "alerts-test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
@pytest.mark.parametrize("command", ["check rules alerts.yaml", "test rules alerts-test.yaml"])
def test_alerts_fire_in_prometheus(command):
    words = ["promtool", *command.split()]
    done = subprocess.run(words, cwd=DEPLOY / "grafana", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- machines for the workers of one server ----


def documents(path: Path) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all(path.read_text())]


def pod_specs() -> list[dict[str, Any]]:
    [ray] = documents(DEPLOY / "kuberay" / "raycluster.yaml")
    [workers] = ray["spec"]["workerGroupSpecs"]
    [pods] = documents(DEPLOY / "leaderworkerset" / "leaderworkerset.yaml")
    template = pods["spec"]["leaderWorkerTemplate"]
    templates = (ray["spec"]["headGroupSpec"]["template"], workers["template"])
    return [one["spec"] for one in (*templates, template["leaderTemplate"], template["workerTemplate"])]


@pytest.mark.parametrize("number", range(4))
def test_pods_of_machines_are_valid_and_run_as_an_ordinary_user(number):
    spec = pod_specs()[number]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
    kubernetes_validate.validate(pod, "1.32", strict=True)
    assert all(container["securityContext"]["runAsNonRoot"] for container in spec["containers"])


def test_ray_cluster_asks_for_tokens():
    [ray] = documents(DEPLOY / "kuberay" / "raycluster.yaml")
    assert ray["spec"]["authOptions"] == {"mode": "token"}
    pinned = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert [ray["spec"]["rayVersion"]] == pinned


def test_pods_join_with_the_command_and_secret_of_the_leader():
    _, _, leader, worker = pod_specs()
    [server], [machine] = leader["containers"], worker["containers"]
    assert server["args"][:3] == ["flambeau", "serve", "/models"]
    assert {one[2:].replace("-", "_") for one in server["args"] if one.startswith("--")} <= SETTINGS
    assert machine["args"][:3] == ["flambeau", "cluster", "join"]
    secrets = [
        env["valueFrom"]["secretKeyRef"]
        for container in (server, machine)
        for env in container["env"]
        if env["name"] == "FLAMBEAU_CLUSTER_SECRET"
    ]
    assert secrets[0] == secrets[1]
    assert server["args"][-1].rpartition(":")[2] == machine["args"][-1].rpartition(":")[2] == "7075"
