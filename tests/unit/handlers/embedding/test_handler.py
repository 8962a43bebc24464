"""Texts → vectors."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.errors import BadRequest, HandlerError, InvalidField

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from flambeau.handlers.embedding.handler import FREE_PADDING, SentenceEmbedder, plan_groups  # noqa: E402
from flambeau.wire.messages import Request  # noqa: E402
from flambeau.worker.context import Context  # noqa: E402
from support.plain_bert import plain_forward  # noqa: E402
from support.sentence_models import minilm_folder, save_bert_folder, save_onnx_folder  # noqa: E402


def load(folder, **options) -> SentenceEmbedder:
    embedder = SentenceEmbedder()
    embedder.initialize(context(folder, **options))
    return embedder


def context(folder=".", count=0, **options) -> Context:
    made = Context("m", str(folder), None, 1, None, "0", model_yaml_config={"handler": options})
    made.begin([Request(job_id=i, request_id=str(i), headers=[], body=b"") for i in range(count)], [None] * count)
    return made


def send(embedder, *bodies):
    rows = [{"body": body} for body in bodies]
    return [json.loads(reply) for reply in embedder.handle(rows, context(count=len(rows)))]


@pytest.fixture(scope="module")
def minilm():
    return load(minilm_folder())


def test_known_components_of_a_known_sentence(minilm):
    [vector] = send(minilm, "This is an example sentence")
    assert vector[:3] == pytest.approx([0.0676, 0.0635, 0.0487], abs=1e-3)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_real_model_equals_the_plain_computation(minilm):
    from safetensors.torch import load_file

    tensors = load_file(minilm_folder() / "model.safetensors")
    texts = ["Hello, world!", "Voilà: a somewhat longer sentence, with words like 'tokenization' in it."]
    for text, got in zip(texts, send(minilm, texts)[0], strict=True):
        ids = minilm.tokenizer.encode(text).ids
        vector = plain_forward(tensors, ids, num_layers=6, num_heads=12).mean(0)
        assert got == pytest.approx((vector / vector.norm()).tolist(), abs=1e-5)


def test_close_meanings_are_closer_than_far_ones(minilm):
    [vectors] = send(
        minilm, ["A man is eating food.", "Someone has a meal.", "The stock market fell.", "Shares lost value today."]
    )
    likeness = np.array(vectors) @ np.array(vectors).T
    assert min(likeness[0, 1], likeness[2, 3]) > 0.4
    assert likeness[:2, 2:].max() < 0.2


def test_vector_does_not_depend_on_neighbors(minilm):
    texts = ["short", "a text of some more words than that", "word " * 200, "another", "and " * 20] * 3
    alone = [send(minilm, text)[0] for text in texts[:5]] * 3
    assert np.abs(np.array(send(minilm, texts)[0]) - np.array(alone)).max() < 1e-5
    assert np.abs(np.array(send(minilm, *texts)) - np.array(alone)).max() < 1e-5


def test_long_text_is_cut(minilm):
    cut, longer = send(minilm, "word " * 254, "word " * 5000)
    assert longer == pytest.approx(cut, abs=1e-6)
    shorter = load(minilm_folder(), max_seq_length=16)
    assert shorter.describe_handle()["maxSequenceLength"] == 16
    assert send(shorter, "word " * 14) == send(shorter, "word " * 50)


def test_vectors_in_base64_are_equal_and_usage_is_reported(tmp_path):
    embedder = load(save_bert_folder(tmp_path))
    texts = ["the cat sat", "a dog"]
    [plain] = send(embedder, texts)
    told = {"input": texts, "encoding_format": "base64", "usage": True}
    [found, one] = send(embedder, told, {"input": "a dog", "encoding_format": "base64"})
    assert found["num_tokens"] == 5 + 4  # with the two that begin and end a text
    vectors = [np.frombuffer(base64.b64decode(text), "<f4") for text in found["embeddings"]]
    assert np.abs(np.array(vectors) - np.array(plain)).max() < 1e-6
    assert one == found["embeddings"][1]


def test_shorter_vectors_are_of_length_one_where_the_model_allows_them(tmp_path):
    folder = save_bert_folder(tmp_path)
    with pytest.raises(InvalidField, match="supports 16 dimensions only") as found:
        send(load(folder), {"input": "the cat", "dimensions": 4})
    assert found.value.field == "dimensions"
    with pytest.raises(InvalidField, match="text 1 is empty") as found:
        send(load(folder), {"input": ["the cat", " "]})
    assert found.value.field == "input"
    with pytest.raises(InvalidField, match="at most 16"):
        send(load(folder, matryoshka=True), {"input": "the cat", "dimensions": 17})
    whole, short, same = send(
        load(folder, matryoshka=True),
        "the cat",
        {"input": "the cat", "dimensions": 4},
        {"input": "the cat", "dimensions": 16},
    )
    assert same == whole
    assert short == pytest.approx((np.array(whole[:4]) / np.linalg.norm(whole[:4])).tolist(), abs=1e-6)


def test_the_models_own_dimensions_are_cut_after_the_norm(tmp_path):
    kinds = ("Transformer", "Pooling", "Normalize")
    steps = [{"type": f"sentence_transformers.models.{kind}", "path": "1_Pooling"} for kind in kinds]
    steps[0]["path"] = ""
    folder = save_bert_folder(tmp_path, modules=steps)
    [whole] = send(load(folder), "the cat")
    save_bert_folder(folder, modules=steps, config_sentence_transformers={"truncate_dim": 4})
    embedder = load(folder, matryoshka=True)
    assert embedder.describe_handle()["dimensions"] == 4
    short, unit, longer = send(
        embedder, "the cat", {"text": "the cat", "normalize": True}, {"text": "the cat", "dimensions": 16}
    )
    assert short == pytest.approx(whole[:4], abs=1e-6)
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)
    assert longer == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("dot", lambda a, b: a @ b),
        ("cosine", lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b)),
        ("euclidean", lambda a, b: -np.linalg.norm(a - b)),
        ("manhattan", lambda a, b: -np.abs(a - b).sum()),
    ],
)
def test_pairs_are_scored_by_the_similarity_that_the_files_name(tmp_path, kind, expected):
    saved = {"similarity_fn_name": kind, "truncate_dim": 6}
    embedder = load(save_bert_folder(tmp_path, config_sentence_transformers=saved))
    first, second = map(np.array, send(embedder, "the cat", "a dog ran"))
    [found] = send(embedder, {"pairs": [["the cat", "a dog ran"]]})
    assert found["scores"] == pytest.approx([expected(first, second)], abs=1e-5)


def test_long_texts_of_pairs_are_cut_only_if_that_is_asked_for_and_queries_never(tmp_path):
    embedder = load(save_bert_folder(tmp_path, sentence_bert_config={"max_seq_length": 5}))
    long, cut = "the cat sat on the mat", "the cat sat"
    [expected] = send(embedder, {"pairs": [["a dog", cut]]})
    [found] = send(embedder, {"pairs": [["a dog", long]], "truncation": True})
    assert found == expected
    for pairs, more in (([["a", "b"], ["a dog", long]], {}), ([[long, "a dog"]], {"truncation": True})):
        with pytest.raises(BadRequest, match=r"of pair . has more than 5 tokens, .* shorten it"):
            send(embedder, {"pairs": pairs, **more})


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_texts_lose_the_side_that_the_tokenizer_names(tmp_path, side):
    documents = {"sentence_bert_config": {"max_seq_length": 5}, "tokenizer_config": {"truncation_side": side}}
    embedder = load(save_bert_folder(tmp_path, **documents))
    whole, kept = send(embedder, "the cat sat on a mat", "on a mat" if side == "left" else "the cat sat")
    assert whole == pytest.approx(kept, abs=1e-6)


def test_pooling_normalization_and_prompts_come_from_the_folder(tmp_path):
    documents = {
        "1_Pooling/config": {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
        "config_sentence_transformers": {"prompts": {"far": "far away and "}},
    }
    embedder = load(save_bert_folder(tmp_path, **documents))
    assert embedder.describe_handle()["dimensions"] == 32
    plain, asked, again = send(
        embedder, "the cat", {"text": "the cat", "prompt_name": "far"}, {"text": "far away and the cat"}
    )
    assert asked == pytest.approx(again, abs=1e-6)
    assert plain != pytest.approx(again, abs=1e-2)
    assert np.linalg.norm(plain) > 2
    [unit] = send(embedder, {"text": "the cat", "normalize": True})
    assert unit == pytest.approx((np.array(plain) / np.linalg.norm(plain)).tolist(), abs=1e-6)
    with pytest.raises(BadRequest, match="no prompt 'near'; it has far"):
        send(embedder, {"text": "the cat", "prompt_name": "near"})


def test_onnx_encoder_is_pooled_here(tmp_path):
    embedder = load(save_onnx_folder(tmp_path))
    one, two = send(embedder, "the", ["a cat", "dog"])
    assert one == pytest.approx([(2 + 4 + 3) / 3, 2 * (2 + 4 + 3) / 3])
    assert two[0] == pytest.approx([(2 + 5 + 6 + 3) / 4, 2 * (2 + 5 + 6 + 3) / 4])
    assert two[1] == pytest.approx([(2 + 7 + 3) / 3, 2 * (2 + 7 + 3) / 3])
    assert embedder.describe_handle()["weights"] == "model.onnx"


def test_broken_tokenizer_is_named(tmp_path):
    save_onnx_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(HandlerError, match=r"tokenizer\.json could not be loaded"):
        load(tmp_path)


@given(st.lists(st.integers(1, 256), min_size=1, max_size=80), st.integers(64, 4096))
def test_groups_hold_every_text_once_within_their_budget(lengths, max_tokens):
    groups = plan_groups(lengths, max_tokens)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        area = max(lengths[place] for place in group) * len(group)
        real = sum(lengths[place] for place in group)
        assert len(group) == 1 or area <= max_tokens
        assert area - real <= max(FREE_PADDING, 0.25 * real)


def test_texts_of_one_length_share_groups():
    assert [len(group) for group in plan_groups([8] * 100, 512)] == [64, 36]


pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

from flambeau.handlers.embedding.encoders import OnnxEncoder  # noqa: E402
from support.onnx_models import save, value  # noqa: E402

DIMS = ["batch", "sequence"]


def test_sentence_vectors_of_the_model_are_used(tmp_path):
    nodes = [
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["mask", "mask"], ["sentence_embedding"]),
        helper.make_node("Identity", ["mask"], ["first_output"]),
    ]
    inputs = [value("attention_mask", DIMS, TensorProto.INT64), value("token_type_ids", DIMS, TensorProto.INT64)]
    outputs = [value("first_output", DIMS), value("sentence_embedding", DIMS)]
    encoder = OnnxEncoder(save(tmp_path / "model.onnx", nodes, inputs, outputs, {}), ("mean",), None)
    mask = np.array([[True, False], [True, True]])
    assert encoder.embed(np.ones((2, 2), np.int64), mask).tolist() == [[2, 0], [2, 2]]


def test_input_that_no_tokenizer_gives_fails_the_load(tmp_path):
    nodes = [helper.make_node("Identity", ["pixel_values"], ["y"])]
    path = save(tmp_path / "model.onnx", nodes, [value("pixel_values", DIMS)], [value("y", DIMS)], {})
    with pytest.raises(HandlerError, match=r"model\.onnx takes pixel_values"):
        OnnxEncoder(path, ("mean",), None)
