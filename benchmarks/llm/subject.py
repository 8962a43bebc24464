"""One subject of the benchmark, in a process of its own: tokens/s of one stream, and of 32 where it can."""

import json
import sys
import time
from pathlib import Path

import torch
from torchvision_stand_in import stand_in_for_torchvision

import flambeau.examples

MODEL = Path(flambeau.examples.__file__).parent / "storyteller"
OPENINGS = (
    "Once upon a time",
    "Long ago",
    "There was once",
    "In a small village",
    "One winter morning",
    "Far away",
    "This",
    "It was",
)
GOING_ON = (", in a land far away,", ", by the sea, there lived", ", a wise old dragon", " there was a little")
PROMPTS = [f"{opening}{more}" for opening in OPENINGS for more in GOING_ON]


def transformers(num_tokens: int) -> dict[str, float]:
    """`generate` with its own cache, greedy."""
    stand_in_for_torchvision()
    import sentencepiece
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(MODEL / "target", dtype=torch.float32).eval()
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(MODEL / "target" / "tokenizer.model"))

    def run(prompt: str) -> float:
        ids = torch.tensor([[tokenizer.bos_id(), *tokenizer.encode(prompt)]])
        wanted = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            began = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), **wanted)
            return num_tokens / (time.perf_counter() - began)

    run(PROMPTS[0])
    return {"one": max(run(prompt) for prompt in PROMPTS[:4])}


def engine(kind: str, num_tokens: int) -> dict[str, float]:
    """Our engine; the best of a few runs, as for the others."""
    from flambeau.llm.engine import Engine
    from flambeau.llm.sampling_params import SamplingParams

    options = {"draft": {"draft": str(MODEL / "draft")}, "lookup": {"speculation": "lookup"}}.get(kind, {})
    subject = Engine.from_pretrained(MODEL / "target", max_num_seqs=32, device="cpu", **options)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    def run(prompts: list[str]) -> tuple[float, float]:
        began = time.perf_counter()
        found = subject.generate(prompts, params)
        seconds = time.perf_counter() - began
        drafted = sum(completion.counts.num_drafted for completion in found)
        accepted = sum(completion.counts.num_accepted for completion in found)
        return len(prompts) * num_tokens / seconds, accepted / drafted if drafted else 0.0

    run(PROMPTS[:1])
    run(PROMPTS)
    subject.wait_until_compiled()
    run(PROMPTS[:1])
    run(PROMPTS)
    one = [run([prompt]) for prompt in PROMPTS[:4]]
    many = [run(PROMPTS) for _ in range(2)]
    subject.close()
    figures = {"one": max(rate for rate, _ in one), "many": max(rate for rate, _ in many)}
    if options:
        figures["accepted"] = sum(share for _, share in one) / len(one)
    return figures


if __name__ == "__main__":
    subject, tokens, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    print(json.dumps(transformers(tokens) if subject == "transformers" else engine(subject, tokens)))
