"""What follows pooling in a sentence-transformers folder, as its modules compute it in torch."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file  # noqa: E402

from flambeau.errors import BadRequest, HandlerError  # noqa: E402
from flambeau.handlers.embedding.embed_request import read_embed_request  # noqa: E402
from flambeau.handlers.embedding.sentence_model import read_folder  # noqa: E402
from support.sentence_models import save_bert_folder, save_tokenizer, write_documents  # noqa: E402
from unit.handlers.embedding.test_handler import load, send  # noqa: E402

TEXTS = ["the cat sat on the mat", "a dog"]
TORCH = "torch.nn.modules"


def module(kind, path=""):
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


def linear(inputs, outputs, bias=True):
    torch.manual_seed(inputs + outputs)
    return torch.nn.Linear(inputs, outputs, bias=bias)


def dense_folder(folder, steps, **documents):
    """A BERT folder with further steps: (path, config, tensors)."""
    modules = [module("Transformer"), module("Pooling", "1_Pooling")]
    modules += [module(path.partition("_")[2], path) for path, _, _ in steps]
    configs = {f"{path}/config": config for path, config, _ in steps if config is not None}
    save_bert_folder(folder, modules=modules, **configs, **documents)
    for path, _, tensors in steps:
        (folder / path).mkdir(exist_ok=True)
        if tensors:
            save_file(
                {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
                folder / path / "model.safetensors",
            )
    return folder


def test_dense_layers_norms_and_their_order(tmp_path):
    plain = torch.tensor(np.array(send(load(save_bert_folder(tmp_path / "plain")), TEXTS)[0]), dtype=torch.float32)
    first, residual, second, norm = linear(16, 24), linear(16, 24, False), linear(24, 24), torch.nn.LayerNorm(24)
    torch.nn.init.normal_(norm.weight)
    tensors = {f"linear.{name}": tensor for name, tensor in first.named_parameters()}
    tensors |= {"residual.weight": residual.weight}
    gelu = {
        "in_features": 24,
        "out_features": 24,
        "activation_function": f"{TORCH}.activation.GELU",
        "use_residual": True,
    }
    steps = [
        ("2_Dense", {"in_features": 16, "out_features": 24, "use_residual": True}, tensors),  # tanh by default
        ("3_Normalize", None, None),
        ("4_Dense", gelu, {f"linear.{name}": one.bfloat16() for name, one in second.named_parameters()}),
        ("5_Dropout", None, None),
        ("6_LayerNorm", {"dimension": 24}, {"norm.weight": norm.weight, "norm.bias": norm.bias}),
        ("7_Normalize", None, None),
    ]
    embedder = load(dense_folder(tmp_path / "dense", steps))
    assert embedder.describe_handle()["dimensions"] == 24
    with torch.inference_mode():
        x = torch.nn.functional.normalize(torch.tanh(first(plain)) + residual(plain))
        y = norm(x + torch.nn.functional.gelu(second.bfloat16().float()(x)))
    wanted = torch.nn.functional.normalize(y).numpy()
    assert np.abs(np.array(send(embedder, TEXTS)[0]) - wanted).max() < 1e-5
    raw = np.array(send(embedder, {"input": TEXTS, "normalize": False})[0])
    assert np.abs(raw - y.numpy()).max() < 1e-4  # only the last one is the requests' to switch off


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation_function": "mine.Act"}, "has the activation mine.Act"),
        ({"module_input_name": "token_embeddings"}, "works on token_embeddings"),
        ({"rank": 3}, "has rank"),
        ({"bias": True}, "lack linear.bias"),
        ({"out_features": 9}, "has out_features 9, but its weights have 8"),
        ({"in_features": 15}, "has in_features 15, but its weights have 16"),
    ],
)
def test_a_step_that_is_not_known_is_named(tmp_path, change, reason):
    steps = [("2_Dense", {"bias": False, **change}, {"linear.weight": linear(16, 8).weight})]
    with pytest.raises(HandlerError, match=reason):
        read_folder(dense_folder(tmp_path, steps))


def test_a_step_without_weights_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(HandlerError, match=r"the step 2_Dense in modules\.json needs it, download the model's folder"):
        read_folder(dense_folder(tmp_path, [("2_Dense", {}, {})]))


def test_a_table_of_tokens_is_a_model(tmp_path):
    save_tokenizer(tmp_path)
    table = torch.randn(16, 8)
    save_file({"embedding.weight": table}, tmp_path / "model.safetensors")
    write_documents(tmp_path, {"modules": [module("StaticEmbedding"), module("Normalize", "1_Normalize")]})
    ids = [[4, 6, 8, 10, 4, 11], [5, 7]]  # without special tokens
    wanted = torch.nn.functional.normalize(torch.stack([table[row].mean(0) for row in ids])).numpy()
    assert np.abs(np.array(send(load(tmp_path), TEXTS)[0]) - wanted).max() < 1e-6
    shared = {"embeddings": table[:4], "mapping": torch.arange(16) % 4, "weights": torch.rand(16)}  # of model2vec
    save_file({name: tensor.contiguous() for name, tensor in shared.items()}, tmp_path / "model.safetensors")
    folded = table[:4][shared["mapping"]] * shared["weights"][:, None]
    wanted = torch.nn.functional.normalize(torch.stack([folded[row].mean(0) for row in ids])).numpy()
    assert np.abs(np.array(send(load(tmp_path), TEXTS)[0]) - wanted).max() < 1e-6


def test_the_tokens_of_a_prompt_are_not_pooled(tmp_path):
    names = ("cls", "mean", "max", "weightedmean")
    prompts = {"prompts": {"query": "the dog ran "}}
    documents = {
        "config_sentence_transformers": prompts,
        "1_Pooling/config": {"pooling_mode": [*names], "include_prompt": False},
    }
    embedder = load(save_bert_folder(tmp_path, **documents))
    texts = ["far away and the road", "mat"]
    found = np.array(send(embedder, {"input": texts, "prompt_name": "query"})[0])
    for text, vector in zip(texts, found, strict=True):
        ids = torch.tensor([embedder.tokenizer.encode(f"the dog ran {text}").ids])
        with torch.inference_mode():
            hidden = embedder.encoder.bert(ids)[0, 4:]  # behind [CLS] and three words
        places = torch.arange(5, 5 + len(hidden))[:, None]  # counted from the text's first token on
        wanted = [hidden[0], hidden.mean(0), hidden.max(0).values, (hidden * places).sum(0) / places.sum()]
        assert np.abs(vector - torch.cat(wanted).numpy()).max() < 1e-5


def test_the_kind_of_a_text_chooses_its_prompt(tmp_path):
    prompts = {"query": "the ", "passage": "a ", "other": "and "}
    embedder = load(save_bert_folder(tmp_path, config_sentence_transformers={"prompts": prompts}))
    one, two, three, named = send(
        embedder,
        {"input": "cat", "input_type": "search_query"},
        {"input": "cat", "input_type": "document"},
        {"input": "cat"},
        {"input": "cat", "prompt_name": "query"},
    )
    near = {"abs": 1e-5}
    assert one == named == pytest.approx(send(embedder, "the cat")[0], **near)
    assert two == pytest.approx(send(embedder, "a cat")[0], **near)
    assert three != pytest.approx(one, **near)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"s2p": "the "}}))
    other = load(tmp_path)
    assert send(other, {"input": "cat", "input_type": "document"})[0] == pytest.approx(three, **near)  # they have none
    for asked, field in (({"input_type": "query"}, "input_type"), ({"prompt_name": "query"}, "prompt_name")):
        with pytest.raises(BadRequest, match="s2p") as caught:
            send(other, {"input": "cat", **asked})
        assert caught.value.field == field
    for asked in ({"input_type": "image"}, {"input_type": "query", "prompt_name": "s2p"}):
        with pytest.raises(BadRequest, match="input_type"):
            read_embed_request({"input": "cat", **asked}, 10)
