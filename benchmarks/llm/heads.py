"""Measures what a head that proposes tokens costs, and how many of them must be accepted for it to pay.

    python benchmarks/llm/heads.py [--preset Llama-3-8B] [--kind eagle3] [--tokens 5] [--streams 1,8,32]

Model and head have random weights: none of the proposed tokens is accepted, and costs are those of a trained head of
this shape. Engines with the same prompts: without a head (`none`), with one as plain PyTorch (`plain`), and with one
by the kernels (`kernels`; on a GPU they are captured as CUDA graphs). The head proposes in every step. The durations of
steps tell how many tokens a step must accept on average for the same speed, and which share of tokens that is if each
is accepted with the same probability. Speeds for shares of 0.6 to 0.9 are computed from them, not measured. The result
is a dated JSON file.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]

import gpu  # noqa: E402
import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402

from flambeau.llm import EngineConfig  # noqa: E402
from flambeau.llm.backends.cpu.bindings import kernels  # noqa: E402
from flambeau.llm.backends.cpu.packed_linear import pack_layers  # noqa: E402
from flambeau.llm.device_backends import make_backend  # noqa: E402
from flambeau.llm.engine import Engine  # noqa: E402
from flambeau.llm.executor.head import HeadModel, HeadProposer  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.architecture import Architecture  # noqa: E402
from flambeau.llm.models.draft_heads import DraftHead, HeadSettings  # noqa: E402
from flambeau.llm.models.head_kinds import make_head  # noqa: E402
from flambeau.llm.models.meta_device import on_meta_device  # noqa: E402
from flambeau.llm.models.presets import preset  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402
from flambeau.llm.proposers import make_head_model  # noqa: E402
from flambeau.llm.quantize.packed_layers import use_fast_layers  # noqa: E402
from flambeau.llm.quantize.quantizer import quantize  # noqa: E402
from flambeau.llm.sampling_params import SamplingParams  # noqa: E402
from flambeau.llm.speculation.adaptive_k import AdaptiveK  # noqa: E402
from flambeau.llm.speculation.ngram import NgramProposer  # noqa: E402

SHARES = (0.6, 0.7, 0.8, 0.9)  # of proposed tokens that are accepted, assumed
DRAFT_VOCABULARY = 32000  # of published EAGLE-3 heads
PROMPT = 64
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 50},  # without a seed: p/q
}
WAYS = ("none", "plain", "kernels")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="Llama-3-8B", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset has, for a trial")
    parser.add_argument("--kind", default="eagle3", choices=("eagle3", "eagle", "mtp"), help="default: %(default)s")
    parser.add_argument("--quantization", choices=("int8", "fp8", "int4"), help="of the model; default: none")
    parser.add_argument("--tokens", type=int, default=5, help="proposed in a step (default %(default)s)")
    parser.add_argument("--streams", default="1,8,32", help="default: %(default)s")
    parser.add_argument("--settings", default="greedy,sampled", help="default: %(default)s")
    parser.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="measured of each case (default %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    return parser.parse_args()


def random_head(kind: str, target: Transformer) -> DraftHead:
    """A head of the published shape: one layer like the target's."""
    arch, weight = target.arch, target.model.embed_tokens.weight
    is_third = kind == "eagle3"
    settings = HeadSettings(
        kind=kind,  # type: ignore[arg-type]
        arch=replace(arch, num_layers=1, windows=(), num_experts=0),
        layers=(2, arch.num_layers // 2, arch.num_layers - 3) if is_third else (arch.num_layers,),
        state_size=arch.hidden_size,
        draft_vocab_size=min(DRAFT_VOCABULARY, arch.vocab_size) if is_third else 0,
    )
    with on_meta_device(weight.dtype):
        head = make_head(settings).eval().requires_grad_(False)
    head.to_empty(device=weight.device)
    generator = torch.Generator(weight.device).manual_seed(1)
    for parameter in head.parameters():
        parameter.normal_(std=0.02, generator=generator) if parameter.dim() > 1 else parameter.fill_(1.0)
    head.rotation.make_tables(weight.device)
    if 0 < settings.draft_vocab_size < arch.vocab_size:
        head.target_ids_D = torch.arange(settings.draft_vocab_size, device=weight.device)
    head.share(target)
    if weight.device.type == "cpu" and kernels.load():
        pack_layers(head, (torch.nn.Linear,))
    return head


def new_engine(model: Transformer, head: DraftHead | None, way: str, asked: argparse.Namespace) -> Engine:
    streams = max(gpu.numbers_of(asked.streams))
    length = PROMPT + (1 + asked.tokens) * 4 * (asked.steps + 20)
    config = EngineConfig(
        max_num_seqs=streams,
        max_model_len=min(length, model.arch.max_length),
        prefix_cache=False,
        speculate_k=asked.tokens,
        speculation=None if head is None else "draft",
    )
    weight = model.model.embed_tokens.weight
    blocks = streams * -(-(length + asked.tokens) // config.block_size)
    cache = KVCache(model.arch, blocks + 1, config.block_size, device=weight.device, dtype=weight.dtype)
    drafting: HeadModel | None = None
    if head is not None:
        drafting = make_head_model(head, model, cache, config, None)
        if way == "plain":
            drafting = replace(drafting, rounds=None, kernels=None)
    backend = make_backend(model, cache, config, states=drafting.states if drafting else None)
    device = str(weight.device)
    return Engine(model.arch, backend, num_blocks=cache.num_blocks, config=config, device=device, draft=drafting)


def measure_both(engine: Engine, streams: int, settings: str, num_steps: int) -> dict[str, float]:
    """The median durations of a step, and in other steps of what the head does in them, in milliseconds."""
    found = measure(engine, streams, settings, num_steps)
    proposals.clear()
    HeadProposer.propose = timed_propose  # type: ignore[method-assign]
    measure(engine, streams, settings, num_steps // 2)
    HeadProposer.propose = propose  # type: ignore[method-assign]
    return found | ({"proposal_ms": statistics.median(proposals[8:])} if proposals else {})


def measure(engine: Engine, streams: int, settings: str, num_steps: int) -> dict[str, float]:
    """The median duration of a step in milliseconds, and its tokens."""
    rng = random.Random(streams)
    params = SamplingParams(max_tokens=4 * num_steps, ignore_eos=True, **SETTINGS[settings])
    for i in range(streams):
        engine.add(str(i), [rng.randrange(engine.arch.vocab_size) for _ in range(PROMPT)], params)
    steps, num_tokens = [], []
    while len(steps) < num_steps + 8 and engine.has_work:
        began = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == streams:
            steps.append(1000 * (time.perf_counter() - began))
            num_tokens.append(sum(len(output.token_ids) for output in outputs))
    for i in range(streams):
        engine.cancel(str(i))
    while engine.has_work:
        engine.step()
    return {"step_ms": statistics.median(steps[8:]), "tokens_of_a_step": statistics.mean(num_tokens[8:]) / streams}


proposals: list[float] = []
propose = HeadProposer.propose


def timed_propose(self, sequences, limits, num_ahead):  # type: ignore[no-untyped-def]
    """Note how long a proposal takes to its end on the device; otherwise the host goes on before."""
    began = time.perf_counter()
    found = propose(self, sequences, limits, num_ahead)
    gpu.synchronize(str(self._device))
    proposals.append(1000 * (time.perf_counter() - began))
    return found


def always_propose() -> None:
    """Have the head propose in every step, and nothing else."""
    AdaptiveK.num_ahead = lambda self, _: max(self._numbers)  # type: ignore[method-assign]
    NgramProposer.propose = lambda *_: None  # type: ignore[method-assign]  # random networks repeat themselves


def accepted_tokens(share: float, num_ahead: int) -> float:
    """How many of the proposed tokens a step accepts, if each is accepted with the same probability after another."""
    return sum(share**place for place in range(1, num_ahead + 1))


def share_for(accepted: float, num_ahead: int) -> float | None:
    """The share at which a step accepts so many; None: more than there are."""
    if accepted > num_ahead:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_tokens(middle, num_ahead) < accepted else (low, middle)
    return high


def compared(plain_ms: float, head: dict[str, float], num_ahead: int) -> dict[str, object]:
    """What follows from the durations of steps without and with a head."""
    ratio = head["step_ms"] / plain_ms
    speeds = {f"computed speed-up if {share:.0%} are accepted": speed_up(share, ratio, num_ahead) for share in SHARES}
    return {
        **head,
        "ratio_of_steps": ratio,
        "break_even_accepted_of_a_step": max(0.0, ratio - 1),
        "break_even_share": share_for(max(0.0, ratio - 1), num_ahead),
        **speeds,
    }


def speed_up(share: float, ratio: float, num_ahead: int) -> float:
    return (1 + accepted_tokens(share, num_ahead)) / ratio


def run_way(model: Transformer, head: DraftHead, way: str, asked: argparse.Namespace) -> dict[str, dict[str, float]]:
    engine = new_engine(model, None if way == "none" else head, way, asked)
    cases = [(n, name) for n in gpu.numbers_of(asked.streams) for name in asked.settings.split(",")]
    for streams in gpu.numbers_of(asked.streams):
        for _ in range(2):  # asks for what is to be compiled
            measure(engine, streams, "greedy", 6)
            engine.wait_until_compiled()
    found = {f"{streams} streams, {name}": measure_both(engine, streams, name, asked.steps) for streams, name in cases}
    engine.close()
    for name, figures in found.items():
        print(f"{way:7} {name:22} " + "  ".join(f"{key} {value:.3f}" for key, value in figures.items()), flush=True)
    return found


def architecture(asked: argparse.Namespace) -> Architecture:
    arch = replace(preset(asked.preset), max_length=8192)
    return replace(arch, num_layers=asked.layers, windows=arch.windows[: asked.layers]) if asked.layers else arch


def main() -> None:
    asked = arguments()
    model = gpu.random_network(
        architecture(asked), asked.device, torch.bfloat16 if asked.device != "cpu" else torch.float32
    )
    if asked.device == "cpu" and kernels.load():
        pack_layers(model, (torch.nn.Linear,))
    if asked.quantization:
        quantize(model, asked.quantization)
        use_fast_layers(model, model.model.embed_tokens.weight.dtype)
    head = random_head(asked.kind, model)
    always_propose()
    found = {}
    for way in asked.ways.split(","):
        found[way] = run_way(model, head, way, asked)
        gc.collect()
    figures = {
        way: {name: compared(found["none"][name]["step_ms"], each, asked.tokens) for name, each in cases.items()}
        for way, cases in found.items()
        if way != "none"
    }
    for way, cases in figures.items():
        for name, each in cases.items():
            share = each["break_even_share"]
            words = "never" if share is None else f"{share:.0%} of tokens"
            print(f"{way:7} {name:22} a step takes {each['ratio_of_steps']:.2f} of one without; pays from {words} on")
    date = datetime.now(UTC)
    result = {
        "date": date.isoformat(timespec="seconds"),
        "command": f"python benchmarks/llm/heads.py {gpu.command_line(sys.argv[1:])}".strip(),
        "machine": machine.describe(),
        "device": torch.cuda.get_device_name() if asked.device != "cpu" else "cpu",
        "torch": torch.__version__,
        "preset": asked.preset,
        "layers": model.arch.num_layers,
        "kind": asked.kind,
        "quantization": asked.quantization,
        "tokens_proposed": asked.tokens,
        "without_a_head": found["none"],
        "heads": figures,
    }
    file = asked.out / f"{date:%Y-%m-%d-%H%M}-llm-heads.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(file)


if __name__ == "__main__":
    main()
