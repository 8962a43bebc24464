"""Changes single keys of config.json and compares the engine's network with that of transformers, from one folder.

A change may be refused or warned of by name, or it gives the logits of transformers. Everything else is a defect.
By hand, for all kinds or some: `PYTHONPATH=tests python -m support.config_attack [kind …]`; several keys at once,
chosen by chance: `… --pairs 500 1` (their number and a seed).
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import support.site.sitecustomize  # noqa: F401  (transformers imports torchvision)
from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.errors import LLMError
from support.checkpoints import KINDS_OF_ALL, LENGTH, VOCAB_SIZE, read_checkpoint, reference

Verdict = Literal["same", "refused", "warned", "not possible", "DIFFERENT", "CRASHED"]
TOLERANCE = 1e-4
REMOVED = "(removed)"
BESIDE = "rope_scaling beside rope_parameters"
DEFECTS = ("DIFFERENT", "CRASHED")
# What files are and which tokens mean something, not what is computed.
_NOT_COMPUTED = """
architectures model_type transformers_version dtype torch_dtype auto_map bos_token_id eos_token_id pad_token_id
vocab_size num_hidden_layers n_layer n_layers quantization_config id2label label2id num_labels problem_type return_dict
output_hidden_states output_attentions chunk_size_feed_forward is_encoder_decoder use_cache
"""
NOT_COMPUTED = frozenset(_NOT_COMPUTED.split())
# The original code counts and not transformers: ALiBi's slopes of any number of heads.
CORRECTED = {("MiniMax", "num_attention_heads")}
WORDS = {  # values of keys that are words
    "act": ("gelu", "relu", "gelu_pytorch_tanh", "relu2", "gelu_new", "quick_gelu", "tanh"),
    "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "position_embedding_type": ("rope", "nope", "alibi"),
}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "truncate": False},
    {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.4},
    {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32, "attention_factor": 1.3},
    {
        "rope_type": "llama3",
        "factor": 3.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    {"rope_type": "default", "partial_rotary_factor": 0.5},
)


@dataclass(frozen=True)
class Change:
    """Another value of one key; REMOVED: the key is left out of the file."""

    kind: str
    key: str
    value: Any


def changes_of(kind: str) -> Iterator[Change]:
    """All changes of a kind's config.json, whether or not transformers can build such a network."""
    for key, value in base_config(kind).items():
        if key in NOT_COMPUTED or (KINDS_OF_ALL[kind].family, key) in CORRECTED:
            continue
        yield Change(kind, key, REMOVED)
        for other in other_values(key, value):
            yield Change(kind, key, other)
    theta = 1000.0
    yield Change(kind, "rope_theta", theta)
    for rope in ROPES:
        yield Change(kind, "rope_parameters", {"rope_theta": theta, **rope})
        yield Change(kind, "rope_scaling", rope)
        yield Change(kind, BESIDE, rope)


def other_values(key: str, value: Any) -> list[Any]:
    """Plausible values of a key, other than that which it has."""
    found: list[Any]
    if key.startswith("rope_"):
        return []
    if isinstance(value, bool):
        found = [not value]
    elif isinstance(value, int):
        found = [value + 1, value * 2, 0]
    elif isinstance(value, float):
        found = [value * 2, 0.0]
    elif isinstance(value, str):
        found = [word for part, words in WORDS.items() if part in key for word in words]
    elif isinstance(value, list):
        found = [value[::-1], value[:1] * len(value), None]
    elif value is None:
        found = [True, 7, 16, 0.5]
    else:
        found = []
    return [other for other in found if other != value or type(other) is not type(value)]


def base_config(kind: str) -> dict[str, Any]:
    return {key: value for key, value in reference(kind).config.to_dict().items() if not key.startswith("_")}


def attack(change: Change, folder: Path) -> tuple[Verdict, str]:
    """What becomes of a change, and a detail of it."""
    try:
        expected = expected_logits(change, folder)
    except Exception as error:  # transformers has no such network
        return "not possible", f"{type(error).__name__}: {error}"[:100]
    return compared(folder, [change.key], expected)


def attack_together(changes: list[Change], folder: Path) -> tuple[Verdict, str]:
    """What becomes of several changes of one kind, none of which edits the file."""
    try:
        network = reference(changes[0].kind, **{change.key: change.value for change in changes})
        network.save_pretrained(folder)
        expected = logits_of(network)
    except Exception as error:
        return "not possible", f"{type(error).__name__}: {error}"[:100]
    return compared(folder, [change.key for change in changes], expected)


def compared(folder: Path, keys: list[str], expected: torch.Tensor) -> tuple[Verdict, str]:
    """What the engine's own network makes of a folder, beside the logits of transformers."""
    try:
        model = load_model(folder)
        if unknown := [key for key in keys if key in model.arch.unknown_keys]:
            return "warned", ", ".join(unknown)
        ids, places = some_ids()[0], torch.arange(LENGTH)
        with torch.inference_mode(), model.rotation.for_length(LENGTH):
            found = model.logits(model(ids, places, WholeAttention()))
    except LLMError as error:
        return "refused", str(error)
    except Exception as error:
        return "CRASHED", f"{type(error).__name__}: {error}"[:200]
    if found.shape[1] > expected.shape[1]:
        return "DIFFERENT", f"shapes {tuple(found.shape)} and {tuple(expected.shape)}"
    difference = float((found - expected[:, : found.shape[1]]).abs().max())
    if difference <= TOLERANCE * max(1.0, float(expected.abs().max()) / 8):
        return "same", f"{difference:.1e}"
    return "DIFFERENT", f"by {difference:.1e} of {float(expected.abs().max()):.1f}"


def expected_logits(change: Change, folder: Path) -> torch.Tensor:
    """Write the changed checkpoint, and return what transformers makes of it; raises if it cannot."""
    network = reference(change.kind, **({} if is_edited(change) else {change.key: change.value}))
    network.save_pretrained(folder)
    if is_edited(change):
        edit(folder / "config.json", change)
        before, network = network.state_dict(), read_checkpoint(folder)
        after = network.state_dict()
        if before.keys() != after.keys() or any(not torch.equal(before[name], after[name]) for name in before):
            raise ValueError("the weights are not those of this configuration")
    return logits_of(network)


def is_edited(change: Change) -> bool:
    """Whether the file is edited for a change; otherwise transformers writes it so."""
    return change.value is REMOVED or change.key in ("rope_scaling", BESIDE)


def logits_of(network: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = network(some_ids()).logits[0].float()
    if not logits.isfinite().all():
        raise ValueError("logits are not finite")
    return logits


def edit(file: Path, change: Change) -> None:
    config = json.loads(file.read_text())
    if change.value is REMOVED:
        config.pop(change.key, None)
    elif change.key == BESIDE:  # as people add it
        config["rope_scaling"] = change.value
    else:  # as files had it before transformers 5
        given = config.pop("rope_parameters")
        config |= {"rope_scaling": change.value, "rope_theta": given["rope_theta"]}
    file.write_text(json.dumps(config))


def some_ids() -> torch.Tensor:
    return torch.randint(VOCAB_SIZE - 1, (1, LENGTH), generator=torch.Generator().manual_seed(7))


def sample_of(number: int, seed: int) -> list[Change]:
    """Changes of all kinds, chosen by chance."""
    rng = random.Random(seed)
    kinds = sorted(KINDS_OF_ALL)
    return [rng.choice([*changes_of(rng.choice(kinds))]) for _ in range(number)]


def pairs_of(number: int, seed: int) -> list[list[Change]]:
    """Two or three changes of one kind each, chosen by chance."""
    rng, kinds = random.Random(seed), sorted(KINDS_OF_ALL)
    chosen = [[change for change in changes_of(rng.choice(kinds)) if not is_edited(change)] for _ in range(number)]
    return [rng.sample(changes, rng.choice((2, 2, 3))) for changes in chosen]


def attack_pairs(number: int, seed: int) -> int:
    """Try changes together, and print the defects."""
    counts: Counter[str] = Counter()
    for changes in pairs_of(number, seed):
        with tempfile.TemporaryDirectory() as folder:
            verdict, detail = attack_together(changes, Path(folder))
        counts[verdict] += 1
        if verdict in DEFECTS:
            together = ", ".join(f"{change.key} = {change.value!r}" for change in changes)
            print(f"{verdict:10} {changes[0].kind:20} {together}: {detail}", flush=True)
    print(*(f"{count} {verdict}" for verdict, count in counts.items()), sep=", ")
    return int(any(counts[verdict] for verdict in DEFECTS))


def main(kinds: list[str]) -> int:
    warnings.simplefilter("ignore")
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if kinds[:1] == ["--pairs"]:
        return attack_pairs(int(kinds[1]), seed=int(kinds[2]))
    counts: Counter[str] = Counter()
    for kind in kinds or KINDS_OF_ALL:
        for change in changes_of(kind):
            with tempfile.TemporaryDirectory() as folder:
                verdict, detail = attack(change, Path(folder))
            counts[verdict] += 1
            if verdict in DEFECTS or verdict == "refused":
                print(f"{verdict:10} {kind:20} {change.key} = {change.value!r}: {detail}", flush=True)
    print(*(f"{number} {verdict}" for verdict, number in counts.items()), sep=", ")
    return int(any(counts[verdict] for verdict in DEFECTS))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
