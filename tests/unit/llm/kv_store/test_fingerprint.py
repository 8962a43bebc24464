"""What blocks depend on besides their tokens."""

from __future__ import annotations

import pytest
import torch

from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.kv_store.fingerprint import adapter_key, fingerprint, weights_digest
from support.tiny_models import ARCH, tiny_model


def test_one_changed_weight_changes_the_digest():
    model, same = tiny_model(), tiny_model()
    assert weights_digest(model) == weights_digest(same)
    [*same.parameters()][-1].view(-1)[5] += 1.0
    assert weights_digest(model) != weights_digest(same)


@pytest.mark.parametrize("change", ["dtype", "block_size", "description", "weights"])
def test_everything_that_counts_is_in_the_fingerprint(change):
    model = tiny_model()
    first = fingerprint(KVCache(ARCH, 2, 4), model, "x")
    assert fingerprint(KVCache(ARCH, 9, 4), model, "x") == first  # the number of blocks does not count
    cache = KVCache(
        ARCH, 2, 8 if change == "block_size" else 4, dtype=torch.float16 if change == "dtype" else torch.float32
    )
    model = tiny_model(seed=7) if change == "weights" else model
    assert fingerprint(cache, model, "y" if change == "description" else "x") != first


def test_types_of_few_bits_have_a_digest_too():
    class Holder(torch.nn.Module):
        def __init__(self, *tensors):
            super().__init__()
            for i, tensor in enumerate(tensors):
                self.register_buffer(f"t{i}", tensor)

    numbers = torch.arange(8)
    kinds = [numbers.to(kind) for kind in (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool)]
    assert weights_digest(Holder(*kinds, torch.tensor(3), torch.empty(0)))


def test_adapters_differ_by_their_files(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    first = adapter_key(b"base", tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    second = adapter_key(b"base", tmp_path)
    assert len({first, second, adapter_key(b"other", tmp_path)}) == 3
    (tmp_path / "README.md").write_text("about it")
    assert adapter_key(b"base", tmp_path) == second
