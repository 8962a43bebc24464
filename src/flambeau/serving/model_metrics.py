"""The metrics of models and workers: their state now, and their traffic as histograms and counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from flambeau.metrics.registry import Labels, MetricFamily
from flambeau.metrics.traffic import SECONDS, SHORT_SECONDS, SIZES, TOKENS, Histogram, ModelTraffic
from flambeau.serving.model import Model
from flambeau.wire.messages import TOKEN_GAPS

Kind = Literal["counter", "gauge", "histogram"]
GENERATES = "generate"  # the ability of models with an engine


class Families:
    """Metric families by name, made when they are first used; a help text is given once."""

    def __init__(self) -> None:
        self._families: dict[str, MetricFamily] = {}

    def set(self, kind: Kind, name: str, help_text: str, labels: Labels, value: float) -> None:
        self._family(kind, name, help_text, ()).values[labels] = value

    def fill(
        self, name: str, help_text: str, bounds: tuple[float, ...], series: Iterable[tuple[Labels, Histogram]]
    ) -> None:
        """Set the series of a histogram."""
        family = self._family("histogram", name, help_text, bounds)
        for labels, histogram in series:
            family.values[labels] = histogram.total
            family.buckets[labels] = histogram.counts
            if histogram.exemplars:
                family.exemplars[labels] = histogram.exemplars

    def _family(self, kind: Kind, name: str, help_text: str, bounds: tuple[float, ...]) -> MetricFamily:
        found = self._families.get(name)
        if found is None:
            found = self._families[name] = MetricFamily(name, kind, help_text, bounds)
        return found

    def __iter__(self) -> Iterator[MetricFamily]:
        return iter(self._families.values())


def model_metrics(models: Iterable[Model], *, vllm_names: bool = False) -> Iterator[MetricFamily]:
    """The current state of models and workers, and the totals of their requests."""
    families = Families()
    for model in models:
        labels: Labels = (("model", model.name), ("version", model.version))
        add_state(families, model, labels)
        add_requests(families, model.traffic, labels)
        if GENERATES in model.abilities or model.traffic.engine.num_steps:
            add_generation(families, model.traffic, labels)
            if vllm_names:
                add_vllm_names(families, model.traffic, (("model_name", model.name), ("version", model.version)))
    yield from families


def add_state(families: Families, model: Model, labels: Labels) -> None:
    """The queue and the workers of a model."""
    put, pool = families.set, model.pool
    for status, count in model.answers.items():
        answers = (*labels, ("status", str(status)))
        put("counter", "flambeau_requests_total", "Requests answered, by model and status.", answers, count)
    put("gauge", "flambeau_queue_jobs", "Jobs that wait for a worker.", labels, model.num_waiting)
    put("gauge", "flambeau_workers_ready", "Workers with the model loaded.", labels, pool.num_ready)
    put("gauge", "flambeau_workers_wanted", "Workers the model should have.", labels, pool.num_wanted)
    for result, count in model.mirror.counts.items() if any(model.mirror.counts.values()) else ():
        text = "Copies of another version's requests: those accepted (mirrored), and what came of them."
        put("counter", "flambeau_mirror_requests_total", text, (*labels, ("result", result)), count)
    if (cache := model.responses) is not None:
        for result, count in cache.counts.items():
            text = "Requests to a model with a response cache: answered from it, with another one's reply, or computed."
            put("counter", "flambeau_response_cache_requests_total", text, (*labels, ("result", result)), count)
        put("gauge", "flambeau_response_cache_bytes", "Memory of kept replies.", labels, cache.size_bytes)
    text = "Workers that ended and were replaced."
    put("counter", "flambeau_worker_restarts_total", text, labels, pool.num_restarts)


def add_requests(families: Families, traffic: ModelTraffic, labels: Labels) -> None:
    """Where the time of requests and batches went."""
    fill = families.fill
    text = "From a request's arrival to the end of its answer."
    by_class = [((*labels, ("status", f"{digit}xx")), times) for digit, times in traffic.by_class.items()]
    fill("flambeau_request_seconds", text, SECONDS, by_class)
    text = "From a request's arrival to its worker's attention, with the wait for a fuller batch."
    fill("flambeau_queue_seconds", text, SECONDS, [(labels, traffic.queue)])
    text = "The part of the queue time in which a worker was free and a batch waited for more requests."
    fill("flambeau_batch_wait_seconds", text, SECONDS, [(labels, traffic.batch_wait)])
    fill("flambeau_batch_size", "Requests sent to a worker together.", SIZES, [(labels, traffic.batch_sizes)])
    fill("flambeau_handler_seconds", "A handler's time for a batch.", SHORT_SECONDS, [(labels, traffic.stages.handler)])
    stages = (
        ("preprocess", traffic.stages.preprocess),
        ("inference", traffic.stages.inference),
        ("postprocess", traffic.stages.postprocess),
    )
    text = "Time of each stage of a handler for a batch; a device's time counts for the stage that waits for it."
    series = [((*labels, ("stage", name)), times) for name, times in stages if times.number]
    fill("flambeau_stage_seconds", text, SHORT_SECONDS, series)


def add_generation(families: Families, traffic: ModelTraffic, labels: Labels) -> None:
    """Tokens and engines of a model that generates."""
    fill, put = families.fill, families.set
    made, engine = traffic.generation, traffic.engine
    text = "From a request's arrival to the first token of its answer."
    fill("flambeau_first_token_seconds", text, SECONDS, [(labels, made.first_token)])
    text = "Between two tokens of an answer; tokens that arrive together share the time."
    fill("flambeau_inter_token_seconds", text, TOKEN_GAPS, [(labels, engine.token_gaps)])
    fill("flambeau_prompt_tokens", "Tokens of a request's prompts.", TOKENS, [(labels, made.prompt_tokens)])
    fill("flambeau_output_tokens", "Tokens generated for a request.", TOKENS, [(labels, made.output_tokens)])
    text = "From joining the engine to the first token: the wait for a place, and the prompt."
    fill("flambeau_prefill_seconds", text, SECONDS, [(labels, made.prefill)])
    text = "From the first token to the last one."
    fill("flambeau_decode_seconds", text, SECONDS, [(labels, made.decode)])
    for reason, number in made.finish_reasons.items():
        text = "Choices that ended, by the reason: stop or length."
        put("counter", "flambeau_choices_finished_total", text, (*labels, ("reason", reason)), number)
    put("gauge", "flambeau_sequences_running", "Sequences in the engines' steps.", labels, engine.num_running)
    put("gauge", "flambeau_sequences_waiting", "Sequences that wait for a place.", labels, engine.num_waiting)
    text = "The share of KV blocks in use, from 0 to 1."
    put("gauge", "flambeau_kv_cache_usage_ratio", text, labels, engine.kv_usage)
    text = "Sequences whose blocks were taken for others, and which are computed again."
    put("counter", "flambeau_preemptions_total", text, labels, engine.num_preempted)
    put("counter", "flambeau_engine_steps_total", "Steps of the engines.", labels, engine.num_steps)
    text = "Prompt tokens that were found in the prefix cache."
    put("counter", "flambeau_prefix_cache_hit_tokens_total", text, labels, made.num_cached)
    text = "KV blocks that were copied to host memory or disk before they left the cache."
    put("counter", "flambeau_kv_blocks_saved_total", text, labels, engine.num_blocks_saved)
    text = "KV blocks that were copied back from host memory or disk."
    put("counter", "flambeau_kv_blocks_restored_total", text, labels, engine.num_blocks_restored)
    put("counter", "flambeau_drafted_tokens_total", "Tokens that speculation proposed.", labels, made.num_drafted)
    text = "Tokens that speculation proposed and the model accepted."
    put("counter", "flambeau_accepted_tokens_total", text, labels, made.num_accepted)


def add_vllm_names(families: Families, traffic: ModelTraffic, labels: Labels) -> None:
    """The same values under the names of vLLM, for dashboards and autoscalers that expect them."""
    fill, put = families.fill, families.set
    made, engine = traffic.generation, traffic.engine
    prompts, outputs = made.prompt_tokens, made.output_tokens
    put("gauge", "vllm:num_requests_running", "Sequences in the engines' steps.", labels, engine.num_running)
    put("gauge", "vllm:num_requests_waiting", "Sequences that wait for a place.", labels, engine.num_waiting)
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        put("gauge", name, "The share of KV blocks in use, from 0 to 1.", labels, engine.kv_usage)
    put("counter", "vllm:num_preemptions_total", "Preempted sequences.", labels, engine.num_preempted)
    put("counter", "vllm:prompt_tokens_total", "Tokens of prompts.", labels, prompts.total)
    put("counter", "vllm:generation_tokens_total", "Generated tokens.", labels, outputs.total)
    put("counter", "vllm:prefix_cache_queries_total", "Prompt tokens looked up.", labels, prompts.total)
    put("counter", "vllm:prefix_cache_hits_total", "Prompt tokens found in the cache.", labels, made.num_cached)
    put("counter", "vllm:spec_decode_num_draft_tokens_total", "Drafted tokens.", labels, made.num_drafted)
    put("counter", "vllm:spec_decode_num_accepted_tokens_total", "Accepted drafts.", labels, made.num_accepted)
    text = "From a request's arrival to the first token of its answer."
    fill("vllm:time_to_first_token_seconds", text, SECONDS, [(labels, made.first_token)])
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        fill(name, "Between two tokens of an answer.", TOKEN_GAPS, [(labels, engine.token_gaps)])
    answered = traffic.by_class.get(2, Histogram(SECONDS))
    text = "From a request's arrival to the end of its answer."
    fill("vllm:e2e_request_latency_seconds", text, SECONDS, [(labels, answered)])
    fill("vllm:request_queue_time_seconds", "Time in the queue.", SECONDS, [(labels, traffic.queue)])
    text = "From joining the engine to the first token."
    fill("vllm:request_prefill_time_seconds", text, SECONDS, [(labels, made.prefill)])
    fill("vllm:request_decode_time_seconds", "From the first token to the last one.", SECONDS, [(labels, made.decode)])
    text = "The mean time of a request's tokens behind the first."
    fill("vllm:request_time_per_output_token_seconds", text, TOKEN_GAPS, [(labels, made.token_times)])
    for reason, number in made.finish_reasons.items():
        text = "Choices that ended, by the reason."
        put("counter", "vllm:request_success_total", text, (*labels, ("finished_reason", reason)), number)
    fill("vllm:request_prompt_tokens", "Tokens of a request's prompts.", TOKENS, [(labels, prompts)])
    fill("vllm:request_generation_tokens", "Tokens generated for a request.", TOKENS, [(labels, outputs)])
