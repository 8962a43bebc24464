"""Reranking, scores and classes at /v1: by cross-encoders, classifiers and models that embed."""

from __future__ import annotations

import json

import pytest

from support.running import RunningServer

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.language_models import ONE_THREAD  # noqa: E402
from support.pretrained_models import save_classifier, save_language_model, save_ranker  # noqa: E402
from support.sentence_models import minilm_folder  # noqa: E402

QUERY, TEXTS = "a cat", ["The rocket", "the cat looks at the river", "London"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    judge = save_language_model(folder / "judge", "qwen3")
    (judge / "README.md").write_text(
        "---\npipeline_tag: text-ranking\n---\nJudge whether the Document meets the requirements"
    )
    ranker, classifier = save_ranker(folder / "ranker"), save_classifier(folder / "classifier")
    return {"ranker": ranker, "classifier": classifier, "judge": judge}


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    embedder = folder / "minilm"
    embedder.mkdir()
    settings = f"handler:\n  name: sentence_embedder\n  model_path: {minilm_folder()}\n"
    (embedder / "model-config.yaml").write_text(settings)
    paths = [*map(str, folders.values()), str(embedder)]
    running = RunningServer(folder / "log", *paths, env=ONE_THREAD).wait_listening()
    running.until(lambda: running.is_ready, timeout=100)  # it loads transformers
    yield running
    running.stop()


def post(server, path, **document):
    body = json.dumps(document).encode()
    return server.request("POST", f"/v1/{path}", body, headers={"content-type": "application/json"})


def expected(folder, pairs):
    """The logits of transformers, each input alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return torch.cat([network(**tokenizer(*pair, return_tensors="pt")).logits for pair in pairs])


def test_documents_are_ordered_by_a_cross_encoder(server, folders):
    reply = post(server, "rerank", model="ranker", query=QUERY, documents=[*TEXTS[:2], {"text": TEXTS[2]}])
    assert reply.status == 200, reply.body
    scores = torch.sigmoid(expected(folders["ranker"], [(QUERY, text) for text in TEXTS]))[:, 0].tolist()
    results = reply.json["results"]
    assert [one["index"] for one in results] == sorted(range(3), key=lambda i: -scores[i])
    assert [one["relevance_score"] for one in results] == pytest.approx(sorted(scores, reverse=True), abs=1e-4)
    assert results[0]["document"]["text"] == TEXTS[results[0]["index"]]
    assert reply.json["usage"]["total_tokens"] > 6
    best = post(server, "rerank", model="ranker", query=QUERY, documents=TEXTS, top_n=1, return_documents=False)
    assert best.json["results"] == [{"index": results[0]["index"], "relevance_score": results[0]["relevance_score"]}]


def test_a_language_model_that_ranks_is_recognised(server):
    plain = post(server, "rerank", model="judge", query=QUERY, documents=TEXTS, return_documents=False)
    assert plain.status == 200, plain.body
    ranked = {one["index"]: one["relevance_score"] for one in plain.json["results"]}
    asked = {"text_1": QUERY, "text_2": TEXTS, "model": "judge"}
    usual = "Given a web search query, retrieve relevant passages that answer the query"
    same = [one["score"] for one in post(server, "score", **asked, instruction=usual).json["data"]]
    assert same == pytest.approx([ranked[i] for i in range(3)], abs=1e-6)
    other = [one["score"] for one in post(server, "score", **asked, instruction="Find").json["data"]]
    assert other != pytest.approx(same, abs=1e-4)
    refused = post(server, "rerank", model="minilm", query=QUERY, documents=TEXTS, instruction="Find")
    assert (refused.status, "no instruction" in refused.json["error"]["message"]) == (400, True)


def test_pairs_are_scored(server, folders):
    reply = post(server, "score", model="ranker", text_1=QUERY, text_2=TEXTS)
    scores = torch.sigmoid(expected(folders["ranker"], [(QUERY, text) for text in TEXTS]))[:, 0].tolist()
    assert [one["score"] for one in reply.json["data"]] == pytest.approx(scores, abs=1e-4)


def test_a_model_that_embeds_scores_by_similarity(server):
    vectors = [
        one["embedding"] for one in post(server, "embeddings", model="minilm", input=[QUERY, *TEXTS]).json["data"]
    ]
    cosines = (np.array(vectors[1:]) @ np.array(vectors[0])).tolist()
    reply = post(server, "score", model="minilm", text_1=QUERY, text_2=TEXTS)
    assert [one["score"] for one in reply.json["data"]] == pytest.approx(cosines, abs=1e-5)
    ranked = post(server, "rerank", model="minilm", query=QUERY, documents=TEXTS).json["results"]
    assert ranked[0]["index"] == 1


def test_texts_are_classified(server, folders):
    reply = post(server, "classify", model="classifier", input=TEXTS[:2])
    assert reply.status == 200, reply.body
    wanted = expected(folders["classifier"], [(text,) for text in TEXTS[:2]]).softmax(-1)
    for one, probs in zip(reply.json["data"], wanted, strict=True):
        assert one["probs"] == pytest.approx(probs.tolist(), abs=1e-4)
        assert one["label"] == ["BAD", "GOOD", "SO SO"][int(probs.argmax())]
        assert one["num_classes"] == 3


def test_a_model_without_the_ability_is_named(server):
    for path, document in (
        ("classify", {"model": "ranker", "input": "a"}),
        ("rerank", {"model": "classifier", "query": "a", "documents": ["b"]}),
    ):
        reply = post(server, path, **document)
        assert (reply.status, reply.json["error"]["param"]) == (400, "model")
    listed = {one["id"]: one["abilities"] for one in server.request("GET", "/v1/models").json["data"]}
    assert listed == {"judge": ["score"], "ranker": ["score"], "classifier": ["classify"], "minilm": ["embed", "score"]}
    long = post(server, "rerank", model="ranker", query=QUERY, documents=["cat " * 500])
    assert (long.status, "tokens" in long.json["error"]["message"]) == (400, True)
    cut = post(server, "rerank", model="ranker", query=QUERY, documents=["cat " * 500], truncate_prompt_tokens=-1)
    assert cut.status == 200


def test_an_error_of_embeddings_names_its_field(server):
    for field, value in (("dimensions", 7), ("dimensions", 4000), ("prompt_name", "query")):
        reply = post(server, "embeddings", model="minilm", input="a cat", **{field: value})
        assert (reply.status, reply.json["error"]["param"]) == (400, field)
    plain, typed = (
        post(server, "embeddings", model="minilm", input="a cat", **more).json for more in ({}, {"input_type": "query"})
    )
    assert plain["data"] == typed["data"]  # a model without prompts: the same for queries
