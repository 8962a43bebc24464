"""Text handlers on a real server answer as a plain PyTorch script does."""

from __future__ import annotations

import json

import pytest
import torch

from support.packing import HANDLERS, pack_network
from support.running import RunningServer

WORDS = ["it", "is", "a", "great", "day", "we", "will", "not", "win", "cafe", "it is", "great day", "not win"]
KNOWN = {word: number + 1 for number, word in enumerate(WORDS)}
UNKNOWN = {**KNOWN, "<unk>": 40}
LABELS = {"0": "World", "1": "Sports", "2": "Business", "3": "Science"}
# What is looked up, written out by hand.
TEXTS = {
    "It's a <b>Great</b> day&nbsp;!": ["it", "is", "a", "great", "day", "it is", "great day"],
    "We won't WIN... Café?": ["we", "will", "not", "win", "cafe", "not win"],
    "a DAY": ["a", "day"],
}
BATCH = {"batchSize": 3, "maxBatchDelay": 600_000}  # only a full batch leaves before the client gives up


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    labels, vocabulary = folder / "index_to_name.json", folder / "source_vocab.pt"
    labels.write_text(json.dumps(LABELS))
    torch.save(KNOWN, vocabulary)
    models = {
        "single": pack_network(folder, "single", "text_classifier", "tiny_text", extra_files=[labels, vocabulary]),
        "batched": pack_network(
            folder, "batched", "text_classifier", "tiny_text", config=BATCH, extra_files=[vocabulary]
        ),
    }
    torch.save(UNKNOWN, vocabulary)
    models["own"] = pack_network(
        folder,
        "own",
        str(HANDLERS / "told_text.py"),
        "tiny_text",
        config={"handler": {"ngrams": 1}},
        extra_files=[labels, vocabulary],
    )
    return folder, models


@pytest.fixture(scope="module")
def server(store):
    folder, models = store
    running = RunningServer(folder / "log", *(str(folder / f"{name}.mar") for name in models)).wait_listening()
    running.until(lambda: running.request("GET", "/readyz").status == 200, timeout=60)
    yield running
    running.stop()


@torch.inference_mode()
def expected(model, numbers, names):
    scores = model(torch.tensor(numbers), torch.tensor([0]))[0].softmax(dim=0)
    return {name: pytest.approx(score, abs=1e-6) for name, score in zip(names, scores.tolist(), strict=True)}


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_cleaned_looked_up_and_classified(server, store, text):
    answer = expected(store[1]["single"], [KNOWN[word] for word in TEXTS[text]], LABELS.values())
    assert server.predict("single", text.encode(), kind="text/plain").json == answer
    assert server.predict("single", text.encode()).json == answer
    assert server.predict("single", text).json == answer  # a JSON string


def test_batch_of_texts_is_answered_in_order(server, store):
    replies = [f.result() for f in server.at_once(lambda text: server.predict("batched", text.encode()), [*TEXTS])]
    assert [reply.json for reply in replies] == [
        expected(store[1]["batched"], [KNOWN[word] for word in words], "0123") for words in TEXTS.values()
    ]


def test_bad_text_fails_alone_in_its_batch(server, store):
    bodies = [b"a DAY", b"\xff\xfe", b"a DAY"]
    good, bad, other = (f.result() for f in server.at_once(lambda body: server.predict("batched", body), bodies))
    assert good.json == other.json == expected(store[1]["batched"], [KNOWN["a"], KNOWN["day"]], "0123")
    assert (bad.status, "UTF-8" in bad.message) == (400, True)


def test_unknown_words_have_a_number_of_their_own_if_the_vocabulary_has_one(server, store):
    names = [label.upper() for label in LABELS.values()]
    answer = expected(store[1]["own"], [KNOWN["a"], 40, KNOWN["day"]], names)  # words only: ngrams is 1
    assert server.predict("own", b"a zebra's day").json == answer


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        (b"", None, "empty"),
        (b"\xff\xfe", "text/plain", "UTF-8"),
        (b"zebra <br> !", None, "no word"),
        (b'{"text": "a"}', "application/json", "object"),
        (b"3", "application/json", "int"),
        (b"text=a", "application/x-www-form-urlencoded", "'text'"),
    ],
)
def test_bad_texts_are_refused_with_the_reason(server, body, kind, reason):
    reply = server.predict("single", body, kind=kind)
    assert reply.status == 400, reply.body
    assert reason in reply.message


def test_explanation_has_what_each_word_adds(server, store):
    text, words = next(iter(TEXTS.items()))
    reply = server.request("POST", "/explanations/single", text.encode(), {"Content-Type": "text/plain"})
    assert reply.status == 200, reply.cause
    assert reply.json["words"] == words
    model, numbers = store[1]["single"], torch.tensor([KNOWN[word] for word in words])
    # The network is linear, so the exact attribution of a word is what its vector adds to the score, without the rest.
    vectors = model.embedding.weight[numbers] - model.embedding.weight[0]
    exact = (vectors @ model.fc.weight[0]).detach()
    torch.testing.assert_close(torch.tensor(reply.json["importances"]), exact / exact.norm(), rtol=1e-3, atol=1e-5)
