"""The kernels give what their plain twins give."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from flambeau.llm.attention import PagedAttention
from flambeau.llm.forward import EagerForward
from flambeau.llm.kernels import building, native
from flambeau.llm.kv_cache import KVCache
from support.llm_steps import greedy, prompts, random_model, room, step_inputs

needs_kernels = pytest.mark.skipif(not native.are_ready(), reason="there is no C++ compiler here")
CASES = {
    "decode": {0: (11, [1]), 1: (0, [2]), 2: (30, [3])},
    "verify": {0: (4, [1] * 4), 1: (17, [2] * 4)},
    "chunks of prompts": {0: (0, [1] * 7), 1: (5, [2] * 22), 2: (8, [3])},
}


def attend(kind, model, cache, inputs, window):
    """The output of one layer for random queries, keys and values, which are always the same ones."""
    arch, generator = model.arch, torch.Generator().manual_seed(5)
    shape = (len(inputs.ids_T), arch.num_heads + 2 * arch.num_kv_heads, arch.head_size)
    qkv = torch.randn(shape, generator=generator).to(cache.keys[0].dtype)
    q, k, v = qkv.split([arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
    return kind(cache, inputs)(1, q, k, v, scale=arch.head_size**-0.5, window=window)


def copy_of(model, cache: KVCache, dtype=torch.float32) -> KVCache:
    """A cache with the same contents."""
    copy = KVCache(model.arch, cache.num_blocks, cache.block_size, dtype=dtype)
    for ours, theirs in zip((*copy.keys, *copy.values), (*cache.keys, *cache.values), strict=True):
        ours.copy_(theirs)
    return copy


@needs_kernels
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_cpu_kernel_attends_and_keeps_as_its_twin_does(case, num_kv_heads, window):
    model = random_model(head_size=32, num_kv_heads=num_kv_heads)
    cache = room(model, 3, rubbish=1.0)
    twin = copy_of(model, cache)
    inputs = step_inputs(CASES[case], query_len=0)
    found = attend(native.NativeAttention, model, cache, inputs, window)
    expected = attend(PagedAttention, model, twin, inputs, window)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.keys[1], twin.keys[1])
    assert torch.equal(cache.values[1], twin.values[1])


@needs_kernels
@pytest.mark.parametrize("head_size", sorted(native.HEAD_SIZES))
def test_the_cpu_kernel_serves_every_head_size_that_it_lists(head_size):
    model = random_model(head_size=head_size)
    cache = room(model, 3, rubbish=1.0)
    inputs = step_inputs(CASES["decode"], query_len=1)
    expected = attend(PagedAttention, model, copy_of(model, cache), inputs, None)
    found = attend(native.NativeAttention, model, cache, inputs, None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@needs_kernels
def test_a_bfloat16_cache_is_summed_in_float32():
    model = random_model(head_size=32)
    cache = room(model, 3, rubbish=1.0, dtype=torch.bfloat16)
    inputs = step_inputs(CASES["chunks of prompts"])
    wide = copy_of(model, cache)  # the same numbers, so that the twin differs by nothing but its last rounding
    found = attend(native.NativeAttention, model, cache, inputs, 6)
    rounded = copy_of(model, wide)
    arch, generator = model.arch, torch.Generator().manual_seed(5)
    qkv = torch.randn((30, arch.num_heads + 2 * arch.num_kv_heads, 32), generator=generator).bfloat16().float()
    q, k, v = qkv.split([arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
    expected = PagedAttention(rounded, inputs)(1, q, k, v, scale=32**-0.5, window=6)
    torch.testing.assert_close(found, expected.bfloat16(), atol=1e-6, rtol=2**-7)


@needs_kernels
def test_a_sequence_gets_the_same_bits_alone_and_among_others():
    model = random_model(head_size=32)
    cache = room(model, 3, rubbish=1.0)
    inputs = step_inputs(CASES["verify"], query_len=4)
    together = attend(native.NativeAttention, model, copy_of(model, cache), inputs, None)
    first = step_inputs({0: CASES["verify"][0]}, query_len=4)
    assert torch.equal(attend_first(model, copy_of(model, cache), first, 8), together[:4])


def attend_first(model, cache, inputs, num_drawn):
    """As `attend`, for the first tokens of so many that are drawn."""
    arch, generator = model.arch, torch.Generator().manual_seed(5)
    qkv = torch.randn((num_drawn, arch.num_heads + 2 * arch.num_kv_heads, arch.head_size), generator=generator)
    parts = qkv[: len(inputs.ids_T)].split([arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
    return native.NativeAttention(cache, inputs)(1, *parts, scale=arch.head_size**-0.5, window=None)


@needs_kernels
@pytest.mark.parametrize("num_rows", [1, 2, 5, 32])
@pytest.mark.parametrize(("size", "width"), [(64, 40), (83, 37)])
def test_the_linear_kernel_gives_the_twins_rows_and_each_the_same_bits_alone(num_rows, size, width):
    x, weight, bias = torch.randn(num_rows, size), torch.randn(width, size), torch.randn(width)
    found = torch.ops.flambeau.linear(x, weight, bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias), atol=2e-5, rtol=1e-5)
    assert torch.equal(found[-1:], torch.ops.flambeau.linear(x[-1:], weight, bias))
    half = weight.bfloat16()
    assert torch.equal(torch.ops.flambeau.linear(x, half, None), torch.ops.flambeau.linear(x, half.float(), None))


@needs_kernels
def test_steps_in_several_threads_at_once_do_not_disturb_each_other():
    x, weight = torch.randn(8, 256), torch.randn(512, 256)
    expected, wrong = torch.ops.flambeau.linear(x, weight, None), []

    def repeat() -> None:
        for _ in range(300):
            if not torch.equal(torch.ops.flambeau.linear(x, weight, None), expected):
                wrong.append(1)

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_kernels
def test_a_model_says_the_same_with_the_kernels_as_without(monkeypatch):
    model, asked = random_model(head_size=16), prompts(4)
    with_kernels = greedy(EagerForward(model, room(model, 4)), asked, 8)
    monkeypatch.setattr(native, "are_ready", lambda: False)
    assert greedy(EagerForward(model, room(model, 4)), asked, 8) == with_kernels


def test_long_prompts_and_other_heads_go_through_the_twin():
    model = random_model(head_size=8)
    assert isinstance(native.choose_attention(room(model, 1), step_inputs(CASES["decode"], 1)), PagedAttention)
    model = random_model(head_size=32)
    inputs = step_inputs({0: (0, [1] * 20)})
    inputs = replace(inputs, ids_T=torch.ones(native.LONGEST_PROMPT + 1, dtype=torch.long))
    assert isinstance(native.choose_attention(room(model, 1), inputs), PagedAttention)


def test_without_a_compiler_one_line_says_so_and_the_twin_computes(tmp_path: Path):
    script = (
        "import logging; logging.basicConfig(format='%(message)s')\n"
        "from support.llm_steps import *\n"
        "from flambeau.llm.forward import EagerForward\n"
        "model = random_model(head_size=16)\n"
        "print(len(greedy(EagerForward(model, room(model, 2)), prompts(2), 3)))\n"
    )
    env = {**os.environ, "PATH": str(tmp_path), "FLAMBEAU_CACHE": str(tmp_path), "CXX": ""}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "2", done.stderr
    said = [line for line in done.stderr.splitlines() if "plain PyTorch" in line]
    assert len(said) == 1
    assert "install g++" in said[0]


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(tmp_path: Path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'x.h:1: error: no such thing' >&2; exit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        building.built_library(tmp_path / "kept", str(compiler))
    assert building.reason(failed.value) == "x.h:1: error: no such thing"
    assert not list((tmp_path / "kept").glob("*.so"))


def test_two_that_build_at_once_build_once(tmp_path: Path):
    compiler, log = tmp_path / "cc", tmp_path / "log"
    compiler.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\n"
        f"echo built >> {log}\nwhile [ $1 != -o ]; do shift; done\necho library > $2\n"
    )
    compiler.chmod(0o755)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(building.built_library(tmp_path / "kept", str(compiler))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.read_text() == "built\n"
    assert {path.read_text() for path in found} == {"library\n"}
    assert len(found) == 4
