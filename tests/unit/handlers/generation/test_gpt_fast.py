"""GPT Fast's interfaces: logits by positions, and SentencePiece's names."""

from __future__ import annotations

import pytest
import torch

from flambeau.errors import HandlerError
from flambeau.handlers.generation.gpt_fast import CachedModel, PieceTokenizer
from flambeau.handlers.generation.settings import compile_words
from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.config import EngineConfig
from flambeau.llm.executor.backend import PLAIN_PYTORCH, UNTIL_INDUCTOR
from flambeau.llm.text.tokenizer import load_tokenizer
from support.language_models import CONTEXT, write_language_model

TEXT = "to be or not"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_language_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def network(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return PieceTokenizer(load_tokenizer(folder))


def reference(network, ids_BT):
    positions = torch.arange(ids_BT.shape[1]).expand(ids_BT.shape)
    with torch.inference_mode():
        return network.logits(network(ids_BT, positions, WholeAttention())).clone()


def test_logits_are_those_of_the_whole_sequence_however_it_is_cut(network):
    model, close = CachedModel(network), {"atol": 1e-5, "rtol": 1e-4}  # other shapes are summed in another order
    torch.manual_seed(1)
    ids_BT = torch.randint(3, 60, (2, 12))
    expected = reference(network, ids_BT)
    whole = model(ids_BT)
    assert whole.shape == (2, 12, network.arch.vocab_size)
    torch.testing.assert_close(whole, expected, **close)
    pieces = [model(ids_BT[:, a:b], torch.arange(a, b)) for a, b in [(0, 5), (5, 6), (6, 12)]]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, **close)
    other = torch.randint(3, 60, (1, 7))  # fewer sequences, over what is cached
    torch.testing.assert_close(model(other, torch.arange(7)), reference(network, other), **close)


def test_cache_grows_in_the_middle_of_a_text(network):
    model = CachedModel(network)
    model.setup_caches(1, 4)
    ids_BT = torch.randint(3, 60, (1, 9))
    pieces = [model(ids_BT[:, :4], torch.arange(4)), model(ids_BT[:, 4:], torch.arange(4, 9))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), reference(network, ids_BT))


def test_logits_may_be_changed_in_place_in_and_out_of_inference_mode(network):
    model = CachedModel(network)
    with torch.inference_mode():
        model(torch.tensor([[1, 2]]))
    logits = model(torch.tensor([[3]]), torch.tensor([2]))
    logits[..., 0] = -torch.inf


def test_weights_have_the_network_s_names_and_are_the_same(network):
    model = CachedModel(network)
    assert model.state_dict().keys() == network.state_dict().keys()
    assert model.network is network
    assert sum(1 for _ in model.parameters()) == sum(1 for _ in network.parameters())


@pytest.mark.parametrize(
    ("x", "positions", "reason"),
    [
        (torch.ones(3, dtype=torch.long), torch.arange(3), r"x must be token ids \[B, T\]"),
        (torch.ones(1, 3, dtype=torch.long), torch.arange(2), "one position for each of the 3 tokens"),
        (torch.ones(1, 1, dtype=torch.long), torch.tensor([CONTEXT]), f"from 0 to {CONTEXT - 1}"),
    ],
)
def test_arguments_that_cannot_be_right_are_named(network, x, positions, reason):
    with pytest.raises(HandlerError, match=reason):
        CachedModel(network)(x, positions)


def test_part_of_a_network_gives_no_logits(network):
    with pytest.raises(HandlerError, match="not possible with several ranks"):
        CachedModel(network, is_whole=False)(torch.ones(1, 1, dtype=torch.long))


def test_tokenizer_has_sentencepiece_s_names(folder, tokenizer):
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=(folder / "tokenizer.model").read_bytes())
    for name in ("bos_id", "eos_id", "pad_id", "unk_id", "vocab_size", "get_piece_size"):
        assert getattr(tokenizer, name)() == getattr(processor, name)()
    ids = processor.encode(TEXT)
    assert tokenizer.encode_as_ids(TEXT) == tokenizer.encode(TEXT, add_bos=False) == ids
    assert tokenizer.encode(TEXT) == load_tokenizer(folder).encode(TEXT)
    assert tokenizer.encode([TEXT, "be"], add_bos=False) == [ids, processor.encode("be")]
    assert tokenizer.encode(TEXT, str, add_bos=False) == processor.encode(TEXT, out_type=str)
    assert tokenizer.encode(TEXT, add_bos=True, add_eos=True) == processor.encode(TEXT, add_bos=True, add_eos=True)
    assert tokenizer.id_to_piece(ids) == [processor.id_to_piece(i) for i in ids]
    pieces = [*tokenizer.id_to_piece(ids), "no such piece"]
    assert tokenizer.piece_to_id(pieces) == [processor.piece_to_id(piece) for piece in pieces]
    assert len(tokenizer) == len(processor)
    with pytest.raises(IndexError):
        tokenizer.id_to_piece(10**6)


def test_tokenizer_decodes_lists_tensors_and_batches(tokenizer):
    ids = tokenizer.encode(TEXT)
    for given in (ids, torch.tensor(ids), [torch.tensor(i) for i in ids]):
        assert tokenizer.decode(given) == tokenizer.decode_ids(given) == TEXT
    assert tokenizer.decode(torch.tensor([ids, ids])) == [TEXT, TEXT]
    assert tokenizer.decode(ids[-1]) == tokenizer.decode([ids[-1]])


@pytest.mark.parametrize(
    ("config", "device", "words"),
    [
        ({}, "cpu", "C++ kernels for the whole step"),
        ({}, "cuda", "CUDA graphs"),
        ({"draft": "d"}, "cpu", "of the model and its draft"),
        ({"compile": False}, "cpu", "plain PyTorch"),
        ({"tensor_parallel_size": 2}, "cuda", "no effect with several ranks"),
        ({"tensor_parallel_size": 2}, "cpu", "the layers of a rank one by one"),
    ],
)
def test_log_says_what_is_compiled_and_how(config, device, words):
    assert words in compile_words(EngineConfig(**config), device)


def test_log_says_once_that_kernels_compute():
    for path in ("CPU kernels", UNTIL_INDUCTOR, "transformers (Net) with paged attention"):
        assert compile_words(EngineConfig(), "cpu", path) == ""  # the line about the engine has it
    assert "C++ kernels for the whole step" in compile_words(EngineConfig(), "cpu", PLAIN_PYTORCH)
