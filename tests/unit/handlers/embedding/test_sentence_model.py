"""What a sentence-transformers folder says."""

from __future__ import annotations

import pytest

from flambeau.errors import HandlerError
from flambeau.handlers.embedding.sentence_model import read_folder
from support.sentence_models import write_documents


def folder(tmp_path, *files, **documents):
    for name in files or ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    write_documents(tmp_path, documents)
    return tmp_path


def step(kind, path=""):
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


def test_bare_folder_means_mean_pooling(tmp_path):
    model = read_folder(folder(tmp_path))
    assert (model.modes, model.normalizes, model.max_seq_length) == (("mean",), False, 512)
    assert (model.prompts, model.default_prompt, model.lowercases) == ({}, None, False)


def test_every_file_is_read(tmp_path):
    documents = {
        "modules": [step("Transformer"), step("Pooling", "pooler"), step("Normalize", "2_Normalize")],
        "pooler/config": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        "sentence_bert_config": {"max_seq_length": 99, "do_lower_case": True},
        "config_sentence_transformers": {"prompts": {"query": "q: "}, "default_prompt_name": "query"},
        "config": {"max_position_embeddings": 128},
        "tokenizer_config": {"model_max_length": 1e30},
    }
    model = read_folder(folder(tmp_path, **documents))
    assert (model.modes, model.normalizes, model.max_seq_length) == (("cls",), True, 99)
    assert (model.prompts, model.default_prompt, model.lowercases) == ({"query": "q: "}, "query", True)
    write_documents(tmp_path, {"sentence_bert_config": {"max_seq_length": None}})
    assert read_folder(tmp_path).max_seq_length == 128
    write_documents(
        tmp_path, {"sentence_bert_config": {"max_seq_length": 99}, "tokenizer_config": {"model_max_length": 20}}
    )
    assert read_folder(tmp_path).max_seq_length == 99  # sentence-transformers sets its tokenizer's limit to this
    write_documents(tmp_path, {"sentence_bert_config": {}})
    assert read_folder(tmp_path).max_seq_length == 20


def test_without_a_pooling_config_a_causal_model_has_the_vector_of_its_last_token(tmp_path):
    named = {"architectures": ["Qwen3ForCausalLM"]}
    assert read_folder(folder(tmp_path, config=named)).modes == ("last",)
    assert read_folder(folder(tmp_path, config={**named, "is_causal": False})).modes == ("mean",)


@pytest.mark.parametrize(
    ("key", "value"), [("truncate_dim", "8"), ("truncate_dim", 0), ("similarity_fn_name", "maxsim")]
)
def test_settings_of_vectors_that_are_not_known_are_refused(tmp_path, key, value):
    with pytest.raises(HandlerError, match=key):
        read_folder(folder(tmp_path, config_sentence_transformers={key: value}))


def test_safetensors_come_first_and_inner_folders_are_found(tmp_path):
    assert read_folder(folder(tmp_path / "a", "tokenizer.json", "onnx/model.onnx")).weights.name == "model.onnx"
    both = folder(tmp_path / "b", "tokenizer.json", "model.onnx", "model.safetensors")
    assert read_folder(both).weights.name == "model.safetensors"
    steps = [step("Transformer", "0_T"), step("Pooling", "1_Pooling")]
    inner = folder(tmp_path / "c", "0_T/tokenizer.json", "0_T/model.safetensors", modules=steps)
    assert read_folder(inner).tokenizer == inner / "0_T" / "tokenizer.json"


def test_missing_and_unknown_files_are_named(tmp_path):
    with pytest.raises(HandlerError, match="there is no folder"):
        read_folder(tmp_path / "absent")
    with pytest.raises(HandlerError, match=r"no model\.safetensors or .*model\.onnx"):
        read_folder(folder(tmp_path / "a", "tokenizer.json"))
    with pytest.raises(HandlerError, match=r"no tokenizer\.json"):
        read_folder(folder(tmp_path / "b", "model.onnx"))
    usual = [step("Transformer"), step("Pooling", "1_Pooling")]
    pylate = {"type": "pylate.models.Dense.Dense", "path": "1_Dense"}
    for steps, reason in (
        ([*usual, step("WeightedLayerPooling")], "the step WeightedLayerPooling"),
        ([usual[0], pylate], "pylate.models.Dense.Dense, which is code of another package"),
        ([usual[0], step("Dense", "2_Dense")], "otherwise a text has no vector, or many"),
        ([*usual, step("Dense", "2_Dense")], "no model.safetensors or pytorch_model.bin"),
    ):
        with pytest.raises(HandlerError, match=reason):
            read_folder(folder(tmp_path / "c", modules=steps))
    for name, document, reason in (
        ("config_sentence_transformers", {"model_type": "SparseEncoder"}, "describes a SparseEncoder"),
        ("sentence_bert_config", {"modality_config": {"text": {}, "message": {}}}, "embeds messages of a chat"),
        ("sentence_bert_config", {"processing_kwargs": {"text": {"max_length": 3}}}, "processing_kwargs"),
    ):
        with pytest.raises(HandlerError, match=reason):
            read_folder(folder(tmp_path / name / reason[:9], **{name: document}))
    with pytest.raises(HandlerError, match=r"modules\.json must hold a JSON list"):
        read_folder(folder(tmp_path / "d", modules={}))
    (tmp_path / "d" / "modules.json").write_text("{")
    with pytest.raises(HandlerError, match=r"modules\.json is not valid JSON"):
        read_folder(tmp_path / "d")


np = pytest.importorskip("numpy")

from flambeau.handlers.embedding.sentence_model import normalize, pool, read_modes  # noqa: E402

HIDDEN = np.array([[[1, -8], [3, -4], [99, 99], [99, 99]], [[1, 2], [3, 4], [5, 6], [7, 8]]], np.float32)
MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], np.float32)
EXPECTED = {
    "cls": [[1, -8], [1, 2]],
    "max": [[3, -4], [7, 8]],
    "mean": [[2, -6], [4, 5]],
    "weighted_mean": [[7 / 3, -16 / 3], [5, 6]],
    "mean_sqrt_len": [[4 / 2**0.5, -12 / 2**0.5], [8, 10]],
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_arrays_and_tensors_are_pooled_alike(mode):
    [found] = pool(HIDDEN, MASK, [mode])
    assert found == pytest.approx(np.array(EXPECTED[mode]))
    torch = pytest.importorskip("torch")
    [tensor] = pool(torch.from_numpy(HIDDEN), torch.from_numpy(MASK), [mode])
    assert tensor.numpy() == pytest.approx(found)


def test_vectors_get_length_one_and_zero_stays_zero():
    assert normalize(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist() == [[0.6, 0.8], [0.0, 0.0]]


def test_modes_are_read_from_the_config():
    assert read_modes({}) == ("mean",)
    assert read_modes({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}) == ("cls", "max")
    with pytest.raises(HandlerError, match="pooling_mode_median_tokens"):
        read_modes({"pooling_mode_median_tokens": True, "pooling_mode_cls_token": True})


@pytest.mark.parametrize(
    ("named", "modes"),
    [
        ("cls", ("cls",)),
        ("lasttoken", ("last",)),
        ("weightedmean", ("weighted_mean",)),
        ("mean_sqrt_len_tokens", ("mean_sqrt_len",)),
        (["max", "cls"], ("max", "cls")),
    ],
)
def test_modes_are_named_since_sentence_transformers_6(named, modes):
    """Earlier versions have a switch for each mode; what is named comes first."""
    document = {"embedding_dimension": 2, "pooling_mode": named, "include_prompt": True}
    assert read_modes(document) == modes
    assert read_modes({**document, "pooling_mode_mean_tokens": True}) == modes


@pytest.mark.parametrize("named", ["median", ["cls", "median"], [], 3])
def test_an_unknown_mode_is_refused_by_name(named):
    with pytest.raises(HandlerError, match="pooling_mode"):
        read_modes({"pooling_mode": named})
    with pytest.raises(HandlerError, match="twist"):
        read_modes({"pooling_mode": "cls", "twist": 2})
