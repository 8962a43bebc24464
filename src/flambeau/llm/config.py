"""EngineConfig and SamplingParams: what the engine is told once, and what each request says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flambeau.llm.errors import InvalidRequest

Quantization = Literal["int8", "int4", "fp8"]
SpeculationKind = Literal["draft", "lookup"]

# What is done with all of them for every token, while everybody else's next step waits.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1000
MAX_STOP_IDS = 1000
MAX_BIASES = 1024
MAX_SHOWN = 100  # characters of a value that is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine uses its machine."""

    device: str = ""  # "cpu", "cuda", "cuda:1"; empty: a GPU where there is one
    tokenizer: str = ""  # a folder or file; empty: beside the checkpoint
    dtype: str = ""  # "float32", "bfloat16", "float16"; empty: float32 on a CPU, the checkpoint's on a GPU
    max_num_seqs: int = 256  # sequences that run at a time
    max_model_len: int | None = None  # tokens of one sequence; None: what the architecture allows
    max_step_tokens: int = 512  # tokens of one step: a longer prompt is computed in chunks
    block_size: int = 16  # tokens of one block of the KV cache
    num_blocks: int | None = None  # None: what the memory allows
    kv_cache_fraction: float = 0.9  # of the free GPU memory; of the host's, see `kv_cache_bytes`
    kv_cache_bytes: int | None = None  # where blocks are counted by memory on a CPU
    prefix_cache: bool = True
    compile: bool = True
    tensor_parallel_size: int = 1  # processes that share the network, each with a device of its own
    quantization: Quantization | None = None  # applied on load
    draft: str = ""  # a folder with a smaller model of the same vocabulary
    speculation: SpeculationKind | None = None  # None: "draft" where there is one
    speculate_k: int = 5  # tokens drafted ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one request asks for. Temperature 0 is greedy."""

    max_tokens: int | None = None  # None: until the model stops or the context is full
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False  # whether the text keeps the stop string that ended it
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None  # None: none; else how many alternatives beside the chosen token
    speculate: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, is_fine, what in self._rules():
            if not is_fine:
                raise InvalidRequest(f"{name} must be {what}, not {repr(getattr(self, name))[:MAX_SHOWN]}", name)

    def _rules(self) -> list[tuple[str, bool, str]]:
        most = self.max_tokens
        return [
            ("max_tokens", most is None or (is_int(most) and most >= 1), "a whole number from 1"),
            ("min_tokens", is_int(self.min_tokens) and self.min_tokens >= 0, "a whole number from 0"),
            ("min_tokens", most is None or self.min_tokens <= most, f"at most max_tokens ({most})"),
            ("temperature", is_between(self.temperature, 0.0, 100.0), "a number from 0 to 100"),
            ("top_k", is_int(self.top_k) and self.top_k >= 0, "a whole number from 0 (0: all)"),
            ("top_p", is_between(self.top_p, 0.0, 1.0) and self.top_p > 0, "a number above 0, up to 1"),
            ("min_p", is_between(self.min_p, 0.0, 1.0), "a number from 0 to 1"),
            ("repetition_penalty", is_between(self.repetition_penalty, 0.01, 100.0), "a number from 0.01 to 100"),
            ("presence_penalty", is_between(self.presence_penalty, -2.0, 2.0), "a number from -2 to 2"),
            ("frequency_penalty", is_between(self.frequency_penalty, -2.0, 2.0), "a number from -2 to 2"),
            ("seed", self.seed is None or (is_int(self.seed) and -(2**63) <= self.seed < 2**64), "a 64-bit number"),
            ("n", is_int(self.n) and 1 <= self.n <= 128, "a whole number from 1 to 128"),
            ("logprobs", self.logprobs is None or (is_int(self.logprobs) and 0 <= self.logprobs <= 20), "0 to 20"),
            (
                "logit_bias",
                all(is_int(t) and is_between(b, -100.0, 100.0) for t, b in self.logit_bias.items()),
                "token ids with numbers from -100 to 100",
            ),
            ("logit_bias", len(self.logit_bias) <= MAX_BIASES, f"at most {MAX_BIASES} token ids"),
            ("stop", all(isinstance(text, str) and text for text in self.stop), "texts that are not empty"),
            ("stop", len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS} texts"),
            (
                "stop",
                all(len(text) <= MAX_STOP_CHARACTERS for text in self.stop if isinstance(text, str)),
                f"texts of at most {MAX_STOP_CHARACTERS} characters",
            ),
            ("stop_token_ids", all(map(is_int, self.stop_token_ids)), "token ids"),
            ("stop_token_ids", len(self.stop_token_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} token ids"),
        ]

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature == 0.0


def is_int(value: object) -> bool:
    """Whether a value is a whole number, and no yes or no."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_between(value: object, low: float, high: float) -> bool:
    """Whether a value is a number within limits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
