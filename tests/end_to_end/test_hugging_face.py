"""`flambeau serve org/name`, from a hub on a real socket, and Hugging Face folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flambeau.serving.model_sources.store import hub_files  # noqa: E402
from flambeau.wire.cluster_messages import RemoteFiles  # noqa: E402
from support import pretrained_models  # noqa: E402
from support.hub_server import serving_hub  # noqa: E402
from support.language_models import ONE_THREAD, write_language_model  # noqa: E402
from support.running import RunningServer, path  # noqa: E402
from support.sentence_models import write_documents  # noqa: E402

TEXTS = ["a cat", "The engineers watch the rocket while the cat looks at the river near London", "Paris", "the sea"]
QUIET = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "", **ONE_THREAD}
FETCH = """
import json, sys
from pathlib import Path
from flambeau.errors import ConfigError
from flambeau.serving.model_sources.hub import fetch, read_hub_name
for name in sys.argv[1:]:
    try:
        folder = fetch(read_hub_name(Path(name)))
        print(json.dumps([str(folder), sorted(file.name for file in folder.iterdir())]))
    except ConfigError as error:
        print(json.dumps(str(error)))
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""

FETCH_AS_A_NODE = """
import asyncio, sys
from pathlib import Path
from flambeau.cluster.model_fetch import fetch
from flambeau.wire.cluster_messages import RemoteFiles
from flambeau.wire.model_files import digest_of, list_files
folder, hub, part = sys.argv[1:]
files = list_files(Path(folder))
held = asyncio.run(fetch(RemoteFiles(folder="checkpoint", hub=hub), files, Path(part)))
assert held == [file.path for file in files] and digest_of(Path(part)) == digest_of(Path(folder))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folders of a repository's two revisions, of a language model, of a sentence model, and a hub."""
    root = tmp_path_factory.mktemp("models")
    first = pretrained_models.save_classifier(root / "first")
    (first / "modeling_own.py").write_text("raise SystemExit('code of the repository was run')")
    (first / "pytorch_model.bin").write_bytes(b"a pickle that nobody needs")
    second = pretrained_models.save_filler(root / "second")
    write_language_model(root / "words")
    sentences = pretrained_models.save_roberta(root / "sentences")
    steps = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    steps += [{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    write_documents(sentences, {"modules": steps, "1_Pooling/config": {"pooling_mode_mean_tokens": True}})
    with serving_hub() as hub:
        hub.repos["acme/mood"] = {"v1": first, "main": second}
        hub.repos["acme/closed"] = {"main": second}
        hub.repos["acme/words"] = {"main": root / "words"}
        hub.gated.add("acme/closed")
        yield root, hub


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def server(models, cache, tmp_path_factory):
    """A model of the hub at a revision, a language model and a sentence model, each by one word."""
    root, hub = models
    words = ["acme/mood@v1", str(root / "words"), str(root / "sentences"), "--batch-size", "8"]
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), **QUIET}
    running = RunningServer(tmp_path_factory.mktemp("server") / "log", *words, "--max-batch-delay", "300", env=env)
    running.start_timeout_s = 140
    yield running.wait_ready()
    running.stop(timeout=40)


def test_model_of_the_hub_answers_as_the_pipeline_does(server, models):
    root, hub = models
    reference = transformers.pipeline("text-classification", model=str(root / "first"), device="cpu")
    for text in TEXTS[:2]:
        reply = server.predict("mood", {"inputs": text})
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        [wanted] = reference(text)
        assert reply.json == [{"label": wanted["label"], "score": pytest.approx(wanted["score"], abs=1e-5)}]
    described = server.describe("mood")
    assert described["modelUrl"] == f"acme/mood@{hub.commit_of('acme/mood', 'v1')}"
    assert server.logged("mood", "transformers text-classification", "BertForSequenceClassification")
    assert server.logged("trust_remote_code is off")
    assert not [path for path in hub.asked if path.endswith((".py", ".bin"))]


def test_requests_of_a_batch_are_answered_as_alone_and_bad_ones_fail_alone(server, models):
    reference = transformers.pipeline("text-classification", model=str(models[0] / "first"), device="cpu")
    bodies = [{"inputs": text} for text in TEXTS]
    bad = [({"inputs": ""}, "is empty"), ({"inputs": "a", "parameters": {"topk": 1}}, "did you mean top_k?")]
    futures = server.at_once(lambda body: server.predict("mood", body), [*bodies, *(body for body, _ in bad)])
    for text, future in zip(TEXTS, futures, strict=False):
        [wanted] = reference(text)
        assert future.result().json == [{**wanted, "score": pytest.approx(wanted["score"], abs=1e-5)}]
    for (_, reason), future in zip(bad, futures[len(bodies) :], strict=True):
        assert future.result().status == 400
        assert reason in future.result().message


def test_kserve_clients_see_and_send_texts(server, models):
    found = server.request("GET", "/v2/models/mood").json
    assert found["platform"] == "flambeau_transformers"
    assert found["inputs"] == [{"name": "inputs", "datatype": "BYTES", "shape": [-1]}]
    assert found["outputs"] == [{"name": "outputs", "datatype": "BYTES", "shape": [1]}]
    body = {
        "inputs": [{"name": "inputs", "datatype": "BYTES", "shape": [2], "data": TEXTS[:2]}],
        "parameters": {"top_k": 1},
    }
    headers = {"Content-Type": "application/json"}
    reply = server.request("POST", "/v2/models/mood/infer", json.dumps(body).encode(), headers)
    [output] = reply.json["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("outputs", "BYTES", [1])
    wanted = server.predict("mood", {"inputs": TEXTS[:2], "parameters": {"top_k": 1}}).json
    assert [[entry["label"] for entry in row] for row in json.loads(output["data"][0])] == [
        [r[0]["label"]] for r in wanted
    ]


def test_kserve_v1_instances_are_inputs(server):
    body = {"instances": [TEXTS[0], {"inputs": TEXTS[1], "parameters": {"top_k": 1}}]}
    headers = {"Content-Type": "application/json"}
    reply = server.request("POST", "/v1/models/mood:predict", json.dumps(body).encode(), headers)
    wanted = [server.predict("mood", text).json[0]["label"] for text in TEXTS[:2]]
    assert [found[0]["label"] for found in reply.json["predictions"]] == wanted


def test_printed_command_works(server):
    [line] = [line for line in server.log.splitlines() if "try: curl" in line and "/mood " in line]
    command = line.partition("try: ")[2]
    found = subprocess.run(["sh", "-c", f"{command} -s"], capture_output=True, text=True, timeout=100)
    assert json.loads(found.stdout)[0]["label"] in ("BAD", "GOOD", "SO SO")


def test_language_model_folder_is_served_by_the_engine(server):
    body = {"model": "words", "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
    reply = server.request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    assert reply.json["usage"]["completion_tokens"] == 4
    assert server.logged("words is served by gpt_handler")


class LanguageServer(RunningServer):
    """`flambeau llm serve`."""

    subcommand = ("llm", "serve")
    start_timeout_s = 140


def test_llm_serve_downloads_a_name_of_the_hub_or_says_why_not(models, cache, tmp_path):
    _, hub = models
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), **QUIET}
    running = LanguageServer(tmp_path / "log", "acme/words", env=env)
    try:
        running.wait_ready()
        assert [model["id"] for model in running.request("GET", "/v1/models").json["data"]] == ["words"]
    finally:
        running.stop(timeout=40)
    command = [sys.executable, "-m", "flambeau", "llm", "serve"]
    found = {**os.environ, "PYTHONPATH": path(), **env}
    for name, words, more in (
        ("acme/none", f"{hub.url} has no model acme/none, or it is private", {}),
        ("acme/other", "HF_HUB_OFFLINE is set, and acme/other is not in", {"HF_HUB_OFFLINE": "1"}),
    ):
        ended = subprocess.run([*command, name], env={**found, **more}, capture_output=True, text=True, timeout=100)
        assert ended.returncode == 1
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr


def test_sentence_transformers_folder_is_served_by_the_embedder(server, models):
    folder = models[0] / "sentences"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModel.from_pretrained(folder).eval()
    found = server.predict("sentences", TEXTS).json
    for text, vector in zip(TEXTS, found, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        wanted = network(input_ids=ids).last_hidden_state.mean(1)[0].tolist()
        assert vector == pytest.approx(wanted, abs=1e-5)


def test_server_process_loads_neither_torch_nor_transformers(server):
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "/tokenizers/" not in maps


def fetch_all(hub, cache, *names, **env):
    """What the hub's client gets for each name: the folder and its files, or the error."""
    found = subprocess.run(
        [sys.executable, "-c", FETCH, *names],
        env={**os.environ, **QUIET, "PYTHONPATH": path(), "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), **env},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_revisions_errors_and_remedies(models, tmp_path):
    _, hub = models
    names = ["acme/mood@v1", "acme/mood", "acme/mood@v9", "acme/absent", "acme/closed"]
    commit = hub.commit_of("acme/mood", "v1")
    first, latest, revision, absent, closed = fetch_all(hub, tmp_path, *names)
    assert first[0].endswith(f"snapshots/{commit}")
    assert first[1] == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert latest[0].endswith(hub.commit_of("acme/mood", "main"))
    assert revision == "acme/mood has no revision 'v9' on the hub; give a branch, a tag or a commit"
    assert f"{hub.url} has no model acme/absent" in absent
    assert "HF_TOKEN" in absent
    assert "is gated; accept its terms at" in closed
    assert "HF_TOKEN" in closed
    [opened, by_commit] = fetch_all(hub, tmp_path, "acme/closed", f"acme/mood@{commit}", HF_TOKEN=hub.token)
    assert opened[0].endswith(hub.commit_of("acme/closed", "main"))
    assert by_commit[0] == first[0]


def test_machine_of_a_cluster_gets_a_model_of_the_hub_by_itself(models, tmp_path):
    _, hub = models
    commit = hub.commit_of("acme/mood", "v1")
    [(folder, _)] = fetch_all(hub, tmp_path / "server", "acme/mood@v1")
    model = tmp_path / "model"
    model.mkdir()
    (model / "checkpoint").symlink_to(folder)
    assert hub_files(model) == (RemoteFiles(folder="checkpoint", hub=f"acme/mood@{commit}"),)
    part = tmp_path / "part"
    part.mkdir()
    env = {**os.environ, **QUIET, "PYTHONPATH": path(), "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "node")}
    command = [sys.executable, "-c", FETCH_AS_A_NODE, str(model), f"acme/mood@{commit}", str(part)]
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr


def test_cached_models_need_no_connection(models, tmp_path):
    _, hub = models
    [online] = fetch_all(hub, tmp_path, "acme/mood@v1")
    asked = len(hub.asked)
    offline, other = fetch_all(hub, tmp_path, "acme/mood@v1", "acme/mood", HF_HUB_OFFLINE="1")
    assert offline == online
    assert len(hub.asked) == asked
    assert "HF_HUB_OFFLINE is set, and acme/mood is not in" in other
    [unreachable] = fetch_all(hub, tmp_path, "acme/mood@v1", HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable == online


def test_interrupted_download_is_not_served(models, tmp_path):
    _, hub = models
    [[folder, _]] = fetch_all(hub, tmp_path, "acme/mood@v1")
    (Path(folder) / "model.safetensors").unlink()
    [again] = fetch_all(hub, tmp_path, "acme/mood@v1", HF_HUB_OFFLINE="1")
    assert "no weights" in again
    [mended] = fetch_all(hub, tmp_path, "acme/mood@v1")
    assert "model.safetensors" in mended[1]


def test_what_cannot_be_served_ends_the_command_with_one_sentence(models, tmp_path):
    _, hub = models
    (tmp_path / "vision").mkdir()
    config = {"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama"}
    (tmp_path / "vision" / "config.json").write_text(json.dumps(config))
    env = {**os.environ, **QUIET, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": path()}
    for name, reason in (
        ("acme/absent", "has no model acme/absent"),
        (str(tmp_path / "vision"), "MllamaForConditionalGeneration, which no built-in handler serves"),
    ):
        command = [sys.executable, "-m", "flambeau.cli.main", "serve", name, "--port", "0"]
        found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
        assert found.returncode == 1
        assert reason in found.stderr.splitlines()[-1]
