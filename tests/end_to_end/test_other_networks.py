"""A model that the engine's own network does not know is served through transformers."""

from __future__ import annotations

import json

import pytest

from flambeau.archive.pack import Recipe, pack
from support.running import RunningServer

pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

from support.language_models import ONE_THREAD
from support.other_networks import write_other
from support.tokenizer_files import write_sentencepiece

SETTINGS = """
minWorkers: 1
maxWorkers: 1
startupTimeout: 300
handler:
  model_path: {folder}
  max_num_seqs: 8
  model_impl: transformers
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    import sentencepiece

    folder = tmp_path_factory.mktemp("other")
    model, store = folder / "model", folder / "store"
    for one in (model, store):
        one.mkdir()
    write_sentencepiece(model)
    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(model / "tokenizer.model")).get_piece_size()
    write_other(model, "NemotronH", vocab_size=vocabulary)
    settings = folder / "model-config.yaml"
    settings.write_text(SETTINGS.format(folder=model))
    pack(Recipe(model_name="tiny", handler="gpt_handler", config_file=settings), store, format="no-archive")
    running = RunningServer(folder / "log", str(store), env=ONE_THREAD).wait_listening()
    running.until(lambda: running.is_ready, timeout=300)  # it loads torch and transformers
    yield running
    running.stop()


def complete(server, **options):
    document = {"model": "tiny", "prompt": "To be, or not to be", "temperature": 0, "max_tokens": 12, **options}
    headers = {"content-type": "application/json"}
    answer = server.request("POST", "/v1/completions", json.dumps(document).encode(), headers=headers)
    assert answer.status == 200, answer.body
    return [choice["text"] for choice in json.loads(answer.body)["choices"]]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_text_and_forms_come_from_a_network_of_transformers(server):
    assert server.logged("NemotronHForCausalLM", "transformers")
    one = complete(server, ignore_eos=True)
    assert complete(server, ignore_eos=True, n=3) == one * 3
    assert complete(server, structured_outputs={"choice": ["maple", "willow"]})[0].strip() in ("maple", "willow")
    shown = json.loads(server.manage("GET", "/models/tiny?customized=true").body)
    assert "NemotronHForCausalLM" in json.dumps(shown)
