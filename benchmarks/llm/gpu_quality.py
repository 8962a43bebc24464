"""Compares what the GPU kernels compute with plain PyTorch, by perplexity and divergence, for every kind of weights.

    python benchmarks/llm/gpu_quality.py [--networks storyteller,Llama-2-7B] [--kinds none,int8,fp8,int4]

Networks: the shipped storyteller, and the first layers of a preset with fixed random weights. Texts are drawn from the
network itself in float32, at temperature 1. All ways to compute them get the same tokens: prompts, decode steps of one
sequence, and decode steps of all texts. The reference is the network in float32 before it was quantized; the
divergence is the mean Kullback-Leibler divergence from it. Plain PyTorch has the same weights and the same type of KV
cache, so what the kernels add is the difference of the two. The result is a dated JSON file.

Shapes: S texts · L tokens of each · N rows whose logits are compared · V vocabulary
"""

import argparse
import copy
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]

import gpu  # noqa: E402
import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402
from cuda_device import need_device  # noqa: E402
from torch import Tensor  # noqa: E402

import flambeau.examples  # noqa: E402
from flambeau.llm.backends.eager import EagerBackend  # noqa: E402
from flambeau.llm.checkpoints.checkpoint import load_model  # noqa: E402
from flambeau.llm.config import EngineConfig  # noqa: E402
from flambeau.llm.device_backends import make_backend  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.presets import preset  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402
from flambeau.llm.quantize.packed_layers import use_fast_layers  # noqa: E402
from flambeau.llm.quantize.quantizer import quantize  # noqa: E402

STORYTELLER = Path(flambeau.examples.__file__).parent / "storyteller" / "target"
LAYERS = 4  # of a preset
LOGITS_STD = 3.0  # of a preset's random network, as sharp as trained ones
BLOCK_SIZE = 16
TEXTS, LENGTH = 32, 128
ALONE = 2  # texts that are computed one by one


def network_of(name: str, device: str) -> Transformer:
    """A network in float32 whose weights bfloat16 represents."""
    if name == "storyteller":
        return load_model(STORYTELLER, device=device, dtype=torch.float32)
    arch = preset(name)
    arch = replace(arch, num_layers=LAYERS, windows=arch.windows[:LAYERS])
    model = gpu.random_network(arch, device, torch.bfloat16).to(torch.float32)
    head = model.model.embed_tokens if model.lm_head is None else model.lm_head
    head.weight *= LOGITS_STD / (0.02 * arch.hidden_size**0.5)
    head.weight.copy_(head.weight.to(torch.bfloat16))
    return model


def blocks_of(length: int) -> int:
    return -(-length // BLOCK_SIZE)


def new_cache(model: Transformer, dtype: torch.dtype) -> KVCache:
    device = model.model.embed_tokens.weight.device
    return KVCache(model.arch, 1 + TEXTS * blocks_of(LENGTH), BLOCK_SIZE, device=device, dtype=dtype)


def step_of(ids_SL: Tensor, start: int, number: int, first_text: int = 0, *, is_prompt: bool = False) -> StepInputs:
    """The tokens of all texts from `start` on; each text has blocks of its own."""
    num_texts = len(ids_SL)
    positions = torch.arange(start, start + number).repeat(num_texts)
    tables = 1 + (first_text + torch.arange(num_texts))[:, None] * blocks_of(LENGTH) + torch.arange(blocks_of(LENGTH))
    slots = tables.repeat_interleave(number, 0)[torch.arange(len(positions)), positions // BLOCK_SIZE]
    return StepInputs(
        ids_SL[:, start : start + number].flatten().contiguous(),
        positions,
        slots * BLOCK_SIZE + positions % BLOCK_SIZE,
        torch.arange(num_texts + 1) * number,
        torch.full((num_texts,), start + number),
        tables[:, : blocks_of(start + number)].contiguous(),
        query_len=0 if is_prompt else number,
    )


Logits = Callable[[Tensor], Tensor]  # ids [S, L] → logits [S, L - 1, V]


def by_prompts(backend: Any) -> Logits:
    def compute(ids_SL: Tensor) -> Tensor:
        found = []
        for first in range(0, len(ids_SL), 4):
            inputs = step_of(ids_SL[first : first + 4], 0, LENGTH - 1, first, is_prompt=True)
            logits_NV = backend.prefill(inputs, torch.arange(len(inputs.ids_T)))
            found.append(logits_NV.float().clone().view(-1, LENGTH - 1, logits_NV.shape[1]))
        return torch.cat(found)

    return compute


def by_steps(backend: Any) -> Logits:
    def compute(ids_SL: Tensor) -> Tensor:
        found = [backend.decode(step_of(ids_SL, place, 1)).float().clone() for place in range(LENGTH - 1)]
        return torch.stack(found, 1)

    return compute


def one_by_one(compute: Logits) -> Logits:
    return lambda ids_SL: torch.cat([compute(row[None]) for row in ids_SL[:ALONE]])


@torch.inference_mode()
def drawn_texts(model: Transformer) -> Tensor:
    """Texts [S, L] that the network itself writes, after one random token."""
    backend = EagerBackend(model, new_cache(model, torch.float32))
    generator = torch.Generator(model.model.embed_tokens.weight.device).manual_seed(1)
    ids_SL = torch.zeros(TEXTS, LENGTH, dtype=torch.int64)
    ids_SL[:, 0] = torch.randint(model.arch.vocab_size, (TEXTS,), generator=torch.Generator().manual_seed(1))
    for place in range(LENGTH - 1):
        chances_SV = backend.decode(step_of(ids_SL, place, 1)).float().softmax(-1)
        ids_SL[:, place + 1] = torch.multinomial(chances_SV, 1, generator=generator)[:, 0].cpu()
    return ids_SL


def compared(logits_SLV: Tensor, reference_SLV: Tensor, ids_SL: Tensor) -> dict[str, float]:
    """The perplexity of the texts, and the mean divergence from the reference."""
    losses, divergences = [], []
    for logits_LV, expected_LV, ids_L in zip(logits_SLV, reference_SLV, ids_SL.to(logits_SLV.device), strict=False):
        log_p, log_q = logits_LV.double().log_softmax(-1), expected_LV.double().log_softmax(-1)
        losses.append(-log_p.gather(1, ids_L[1:, None]).mean())
        divergences.append((log_q.exp() * (log_q - log_p)).sum(-1).mean())
    return {
        "perplexity": torch.stack(losses).mean().exp().item(),
        "divergence": torch.stack(divergences).mean().item(),
    }


@torch.inference_mode()
def run_kind(wide: Transformer, kind: str, ids_SL: Tensor, reference_SLV: Tensor) -> dict[str, Any]:
    plain_model = copy.deepcopy(wide).to(torch.bfloat16)
    if kind != "none":
        quantize(plain_model, kind)
    fast_model = copy.deepcopy(plain_model)
    use_fast_layers(fast_model, torch.bfloat16)
    plain = EagerBackend(plain_model, new_cache(plain_model, torch.bfloat16))
    config = EngineConfig(max_num_seqs=TEXTS, max_model_len=LENGTH, compile=True)
    kernels = make_backend(fast_model, new_cache(fast_model, torch.bfloat16), config)
    for number in (1, TEXTS):
        kernels.decode(step_of(ids_SL[:number], 0, 1))  # asks for its graph
        kernels.wait_until_compiled()
        kernels.decode(step_of(ids_SL[:number], 0, 1))
    found: dict[str, Any] = {"decode_path": kernels.decode_path}
    ways = {
        "prompts": by_prompts,
        "steps of one": lambda each: one_by_one(by_steps(each)),
        f"steps of {TEXTS}": by_steps,
    }
    for name, way in ways.items():
        found[name] = {
            program: compared(way(backend)(ids_SL), reference_SLV, ids_SL)
            for program, backend in (("plain", plain), ("kernels", kernels))
        }
        columns = (
            f"{each} {found[name][each]['perplexity']:.4f} {found[name][each]['divergence']:.3e}"
            for each in found[name]
        )
        print(f"{kind:5} {name:12} {'   '.join(columns)}", flush=True)
    kernels.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="storyteller,Llama-2-7B", help="default: %(default)s")
    parser.add_argument("--kinds", default="none,int8,fp8,int4", help="default: %(default)s")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    asked = parser.parse_args()
    need_device(asked.device)
    date = datetime.now(UTC)
    result: dict[str, Any] = {
        "date": date.isoformat(timespec="seconds"),
        "command": f"python benchmarks/llm/gpu_quality.py {gpu.command_line(sys.argv[1:])}".strip(),
        "machine": machine.describe(),
        "device": torch.cuda.get_device_name() if asked.device != "cpu" else "cpu",
        "torch": torch.__version__,
        "texts": TEXTS,
        "tokens": LENGTH,
        "networks": {},
    }
    for name in asked.networks.split(","):
        with torch.inference_mode():
            wide = network_of(name, asked.device)
            ids_SL = drawn_texts(wide)
            reference_SLV = by_prompts(EagerBackend(wide, new_cache(wide, torch.float32)))(ids_SL)
        figures: dict[str, Any] = {"float32": compared(reference_SLV, reference_SLV, ids_SL)}
        print(f"{name}: perplexity in float32 {figures['float32']['perplexity']:.4f}", flush=True)
        for kind in asked.kinds.split(","):
            figures[kind] = run_kind(wide, kind, ids_SL, reference_SLV)
            gc.collect()
        result["networks"][name] = figures
        del wide, reference_SLV
        gc.collect()
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"{date:%Y-%m-%d-%H%M}-llm-gpu-quality.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(file)


if __name__ == "__main__":
    main()
