"""GptHandler: text generation with flambeau's own engine.

Shapes: B requests · T tokens of the longest; shorter rows end with PAD
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.base import BaseHandler, Rows
from flambeau.handlers.device import choose_device
from flambeau.handlers.generation.chat_images import ChatImages
from flambeau.handlers.generation.chat_sounds import ChatSounds
from flambeau.handlers.generation.engines import Follower, check_ranks, with_draft
from flambeau.handlers.generation.generate_request import GenerateRequest, refuse_unsupported
from flambeau.handlers.generation.generation_jobs import GptGeneration
from flambeau.handlers.generation.gpt_fast import CachedModel, PieceTokenizer, to_cached
from flambeau.handlers.generation.job_progress import GenerationMetrics
from flambeau.handlers.generation.reply_formats import numbers_of
from flambeau.handlers.generation.request_reader import Prompted, RequestReader, ResumeState
from flambeau.handlers.generation.settings import GptSettings, compile_words, read_settings, shortened
from flambeau.handlers.options import warn_of_misspelled_keys
from flambeau.handlers.request_rows import is_describe, refuse_explain
from flambeau.llm.chat.chat_format import ChatFormat
from flambeau.llm.core.outputs import Completion
from flambeau.llm.engine import Engine
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.text.tokenizer import Tokenizer
from flambeau.wire.messages import Request

if TYPE_CHECKING:
    from flambeau.worker.context import Context

logger = logging.getLogger(__name__)

Headers = Sequence[tuple[str, str]]
PAD = -1  # no token
# Methods that a subclass may override, and what follows:
OWN_LOOP = ("handle", "inference", "generate", "speculative_decode")  # the handler runs in batches
OWN_GENERATE = ("generate", "speculative_decode")  # they get no other settings than …
GENERATE_KNOWS = ("max_tokens", "temperature", "top_k")  # … these
OWN_FORM = ("preprocess", "postprocess")  # they run for predictions only


def abilities_of(tokenizer: Tokenizer, images: ChatImages | None, sounds: ChatSounds | None = None) -> tuple[str, ...]:
    """What front ends may ask of the model."""
    more = {
        "infill": tokenizer.infill is not None,
        "vision": images is not None,
        "video": images is not None and images.videos is not None,
        "audio": sounds is not None,
    }
    return ("generate", "chat", "tokenize", *(name for name, is_able in more.items() if is_able))


class GptHandler(BaseHandler):
    """Generates text. In the server requests join the engine one by one; a direct call runs the stages.

    Attributes:
        model: The network; `model(x, input_pos)` gives logits, with a KV cache of its own.
        tokenizer: Text to tokens and back, with SentencePiece's names.
        device: The torch device of the network.
        draft_model: The smaller network that drafts, or None.
        max_new_tokens, temperature, top_k: Defaults for requests that do not set them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: Any = None
        self.draft_model: Any = None
        self.engine: Engine | None = None
        self.settings: GptSettings | None = None
        self.max_new_tokens = 0
        self.temperature = 1.0
        self.top_k: int | None = None
        self._prepared: tuple[Tensor | None, list[GenerateRequest]] = (None, [])  # the batch's prompts and requests
        self._completions: list[Completion] = []  # of the batch
        self._inferred: tuple[Tensor, list[SamplingParams]] | None = None  # the batch of `inference`, while it runs
        self._follower: Follower | None = None  # on a rank other than 0

    # ---- loading ----

    def initialize(self, context: Context) -> None:
        """Read the settings, load the checkpoint and the tokenizer, and build the engine."""
        self.context, self.manifest = context, context.manifest
        self.model_yaml_config = context.model_yaml_config or {}
        properties = context.system_properties
        self.device, self.map_location = choose_device(properties.get("gpu_id"))
        is_own = type(self) is not GptHandler
        settings = self.settings = read_settings(
            self.model_yaml_config, Path(properties["model_dir"]), device=str(self.device), allows_others=is_own
        )
        rank, num_ranks = check_ranks(settings)
        self._warn_of_ignored(num_ranks)
        config = replace(settings.engine, tensor_parallel_size=num_ranks)
        began = time.perf_counter()
        if rank > 0:
            self._follower = Follower(settings.model_path, config)
            self.initialized = True
            return
        self.engine = Engine.from_pretrained(settings.model_path, config)
        if words := shortened(self.engine.max_length, config.max_model_len, self.engine.arch.max_length):
            logger.warning(words)
        self.model = to_cached(self.engine.model, is_whole=num_ranks == 1)
        self.draft_model = to_cached(self.engine.draft_model) if self.engine.draft_model is not None else None
        sampling = settings.sampling
        self.max_new_tokens, self.temperature, self.top_k = (
            sampling.max_tokens or 0,
            sampling.temperature,
            sampling.top_k or None,
        )
        self._connect(settings, context)
        took_s = time.perf_counter() - began
        logger.info("%s is loaded, in %.2f s: %s", settings.model_path, took_s, self.engine.info)
        if words := compile_words(self.engine.config, self.device.type, self.engine.info.decode):
            logger.info("%s", words)
        self.initialized = True

    def _warn_of_ignored(self, num_ranks: int) -> None:
        if "pt2" in self.model_yaml_config:
            logger.warning("pt2 has no effect on %s; set compile in the handler section", type(self).__name__)
        warn_of_misspelled_keys(self.model_yaml_config)
        num_gpus = torch.cuda.device_count()
        if num_ranks == 1 and num_gpus > 1:
            logger.warning(
                "%d GPUs are visible, and each worker has a copy of the whole network on one of them; parallelType: tp "
                "with parallelLevel: %d shares one network among them",
                num_gpus,
                num_gpus,
            )

    def _connect(self, settings: GptSettings, context: Context) -> None:
        assert self.engine is not None
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise HandlerError(f"{settings.model_path} has no tokenizer; name one with tokenizer_path")
        self.tokenizer = PieceTokenizer(tokenizer)
        chat_format = ChatFormat.of(tokenizer, settings.tool_parser, settings.reasoning_parser)
        if words := chat_format.describe(shows_tools=tokenizer.shows_tools):
            logger.info("%s", words)
        images, sounds = self.engine.images, self.engine.sounds
        chat_images = chat_sounds = None
        if images is not None:
            chat_images = ChatImages.of(images.arch, images.processor, tokenizer, images.videos)
        if sounds is not None:
            chat_sounds = ChatSounds.of(sounds.arch, sounds.processor, tokenizer)
        self._reader = RequestReader(
            tokenizer,
            max_length=self.engine.max_length,
            defaults=self._defaults(),
            has_own_limit=settings.limits_length,
            streams=settings.stream,
            chat_format=chat_format,
            images=chat_images,
            sounds=chat_sounds,
        )
        self._generation = GptGeneration(
            self.engine,
            self._read,
            tokenize=self._reader.tokenize,
            abilities=abilities_of(tokenizer, chat_images, chat_sounds),
            resume=settings.resume,
            on_finished=GenerationMetrics(context.metrics),
            has_own_read=lambda: any(map(self._overrides, OWN_FORM)),
        )

    def _defaults(self) -> SamplingParams:
        assert self.settings is not None
        return self.settings.sampling

    # ---- in the server: step by step ----

    def generation(self) -> GptGeneration | Follower | None:
        """How the worker runs this handler; None (batches through `handle`) if a subclass has its own loop."""
        if self._follower is not None:
            return self._follower
        if changed := [name for name in OWN_LOOP if self._overrides(name)]:
            text = "%s overrides %s: it runs in batches and is not available at /v1, OpenAI's API"
            logger.info(text, type(self).__name__, ", ".join(changed))
            atexit.register(self._generation.close)  # ends the other ranks as well
            return None
        if self.model_yaml_config.get("openai") is not False:
            self._warn_of_openai()
        return self._generation

    def _warn_of_openai(self) -> None:
        if changed := [name for name in OWN_FORM if self._overrides(name)]:
            logger.warning(
                "%s overrides %s; /v1/chat/completions and /v1/completions do not call it and return the model's "
                "plain text. Set openai: false in model-config.yaml to remove the model from /v1",
                type(self).__name__,
                " and ".join(changed),
            )

    def _overrides(self, name: str) -> bool:
        method = getattr(self, name)  # of the class, or set on the instance, perhaps with a clock around it
        return getattr(method, "__func__", method) is not getattr(GptHandler, name)

    def _read(self, request: Request, row: Mapping[str, Any], state: ResumeState | None) -> Prompted:
        """Read a job's request; stages that a subclass overrides run for this request alone."""
        if request.kind == "generate":
            return self._reader.generate(row["body"], state)
        if self._overrides("preprocess"):
            ids_BT, [ask] = self._prepare([row])
            ids = rows_of(ids_BT)[0]
        else:
            ask = self._reader.read(row, request.headers)
            ids = self._reader.encode_request(ask)
        finish = None
        if self._overrides("postprocess"):

            def finish(new_ids: Sequence[int], text: str) -> Any:
                return self.postprocess(self._to_tensor([[*ids, *new_ids]]))[0]

        return self._reader.predict(ask, ids, state, finish)

    # ---- the stages ----

    def preprocess(self, data: Rows) -> Tensor:
        """Requests → the tokens of their prompts [B, T]."""
        asks = [self._reader.read(row, headers) for row, headers in zip(data, self._headers(len(data)), strict=True)]
        ids_BT = self._to_tensor([self._reader.encode_request(ask) for ask in asks])
        self._prepared = (ids_BT, asks)
        return ids_BT

    def _headers(self, count: int) -> Sequence[Headers]:
        context: Any = self.context
        requests = getattr(context, "requests", ())  # a MockContext has none
        return [request.headers for request in requests] if len(requests) == count else [()] * count

    def _prepare(self, data: Rows) -> tuple[Tensor, list[GenerateRequest]]:
        """Tokens and requests of a batch; requests are read here if a subclass's `preprocess` does not read them."""
        self._prepared = (None, [])
        ids_BT = self.preprocess(data)
        asks = self._prepared[1]
        if len(asks) != len(data):
            pairs = zip(data, self._headers(len(data)), strict=True)
            asks = [self._ask_or_default(row, headers) for row, headers in pairs]
        self._prepared = (ids_BT, asks)
        return ids_BT, asks

    def _ask_or_default(self, row: Any, headers: Headers) -> GenerateRequest:
        try:
            return self._reader.read(row, headers)
        except BadRequest:  # a subclass's preprocess has a format of its own
            return GenerateRequest(params=self._defaults())

    def inference(self, data: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Tokens of prompts [B, T] → tokens of prompts and completions, by `generate` or `speculative_decode`."""
        prepared, asks = self._prepared
        if prepared is not data:  # not from our own preprocess
            asks = [GenerateRequest(params=self._defaults())] * len(rows_of(data))
        if any(map(self._overrides, OWN_GENERATE)):
            return self._inference_one_by_one(data, asks)
        # One call for the whole batch; each request keeps its own settings, which these methods have no parameters for.
        first = asks[0].params
        draws = (first.temperature, first.top_k or None)
        self._inferred = (data, [replace(ask.params, n=1) for ask in asks])
        try:
            if self._speculates and any(ask.params.speculate for ask in asks):
                return self.speculative_decode(
                    data, self.draft_model, self._speculate_k, first.temperature, first.top_k
                )
            return self.generate(data, first.max_tokens or self.max_new_tokens, *draws)
        finally:
            self._inferred = None

    @property
    def _speculates(self) -> bool:
        return self.engine is not None and self.engine.info.speculation is not None

    @property
    def _speculate_k(self) -> int:
        return self.engine.config.speculate_k if self.engine is not None else 0

    def _inference_one_by_one(self, data: Tensor, asks: Sequence[GenerateRequest]) -> Tensor:
        sequences = []
        for ids, ask in zip(rows_of(data), asks, strict=True):
            full_T = self._generate_alone(self._to_tensor([ids])[0], ask.params)
            sequences.append(rows_of(full_T)[0])
        return self._to_tensor(sequences)

    def _generate_alone(self, ids_T: Tensor, params: SamplingParams) -> Tensor:
        usual = self.max_new_tokens
        length, top_k = params.max_tokens or usual, params.top_k or None
        if self.draft_model is None or not self._overrides("speculative_decode"):
            return self.generate(ids_T, length, params.temperature, top_k)
        self.max_new_tokens = length  # it has no parameter for the length
        try:
            return self.speculative_decode(ids_T, self.draft_model, self._speculate_k, params.temperature, top_k)
        finally:
            self.max_new_tokens = usual

    def postprocess(self, data: Tensor) -> list[Any]:
        """Tokens [B, T] → their texts."""
        return [self.tokenizer.decode(ids) for ids in rows_of(data)]

    def handle(self, data: Rows, context: Context) -> list[Any]:
        """Run a batch through the stages; each reply is `{"generated_text": …}`."""
        began = time.perf_counter()
        self.context = context
        if is_describe(context):
            return [self.describe_handle()]
        refuse_explain(context, type(self).__name__)
        ids_BT, asks = self._prepare(data)
        self._refuse_ignored(asks)
        prompts = rows_of(ids_BT)
        self._completions = []
        texts = self.postprocess(self.inference(ids_BT))
        replies = [self._reply(i, text, asks[i], prompts[i]) for i, text in enumerate(texts)]
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")
        return replies

    def _refuse_ignored(self, asks: Sequence[GenerateRequest]) -> None:
        """Reject settings that a subclass's `generate` does not get; its own stages may read them themselves."""
        own = [name for name in OWN_GENERATE if self._overrides(name)]
        if own and not self._overrides("preprocess") and not self._overrides("inference"):
            for ask in asks:
                refuse_unsupported(
                    ask, GENERATE_KNOWS, self._defaults(), f"{type(self).__name__}, whose {own[0]} is its own"
                )

    def _reply(self, i: int, text: Any, ask: GenerateRequest, prompt: list[int]) -> Any:
        if not isinstance(text, str):
            return text
        completion = self._completions[i] if i < len(self._completions) else None
        if completion is not None and not self._overrides("postprocess"):
            # The prompt as it was sent: decoding its tokens may give another spelling.
            sent = ask.prompt if isinstance(ask.prompt, str) and ask.prompt else self.tokenizer.decode(prompt)
            is_full = ask.messages is None if ask.full_text is None else ask.full_text
            text = sent + completion.text if is_full else completion.text
        document: dict[str, Any] = {"generated_text": text}
        if ask.details and completion is not None:
            document["details"] = {"finish_reason": completion.finish_reason, **numbers_of(completion)}
        return document

    # ---- for subclasses and direct callers ----

    def generate(
        self,
        prompt_tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        callback: Callable[[Tensor], object] | None = None,
    ) -> Tensor:
        """Prompts [T] or [B, T] → prompts and new tokens; `callback` gets each new token at once."""
        params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature, top_k=top_k or 0, speculate=False)
        return self._generate(prompt_tokens, params, callback)

    def speculative_decode(
        self,
        prompt_tokens: Tensor,
        draft_model: Any,
        speculate_k: int,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> Tensor:
        """The same with a draft model's proposals, verified so that the model's distribution is kept."""
        assert self.engine is not None
        params = SamplingParams(max_tokens=self.max_new_tokens, temperature=temperature, top_k=top_k or 0)
        if draft_model is self.draft_model and (draft_model is None or speculate_k == self.engine.config.speculate_k):
            return self._generate(prompt_tokens, params, None)
        prompts = rows_of(prompt_tokens)
        draft = draft_model.network if isinstance(draft_model, CachedModel) else draft_model
        drafted = with_draft(self.engine, draft, speculate_k, num_sequences=len(prompts))
        return self._joined(prompt_tokens, drafted.generate(prompts, params))

    def _generate(
        self, prompt_tokens: Tensor, params: SamplingParams, callback: Callable[[Tensor], object] | None
    ) -> Tensor:
        def on_tokens(index: int, token_ids: list[int]) -> None:
            if callback is not None:
                for token in token_ids:
                    callback(torch.tensor([token], dtype=torch.long, device=self.device))

        prompts = rows_of(prompt_tokens)
        each = [params] * len(prompts)
        if self._inferred is not None and self._inferred[0] is prompt_tokens:
            each = self._inferred[1]
        completions = self._generation.complete(prompts, each, on_tokens if callback else None)
        if self._inferred is not None:
            self._completions = completions
        return self._joined(prompt_tokens, completions)

    # ---- tensors ----

    def _joined(self, prompt_tokens: Tensor, completions: Sequence[Completion]) -> Tensor:
        pairs = zip(rows_of(prompt_tokens), completions, strict=True)
        full_BT = self._to_tensor([[*prompt, *completion.token_ids] for prompt, completion in pairs])
        return full_BT[0] if prompt_tokens.dim() == 1 else full_BT

    def _to_tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return to_tensor(rows, self.device)

    # ---- description ----

    def describe_handle(self) -> Any:
        """The engine's settings and load, for `describe?customized=true`."""
        assert self.engine is not None
        state, info = self.engine.state, self.engine.info
        return {
            "device": info.device,
            "dtype": info.dtype,
            "quantization": info.quantization,
            "speculation": info.speculation,
            "speculate_k": info.speculate_k if info.speculation else 0,
            "compile": self.engine.config.compile,
            "decode": info.decode,
            "context_length": info.max_length,
            "vocabulary": self.engine.arch.vocab_size,
            "max_num_seqs": self.engine.config.max_num_seqs,
            "running": state.num_running,
            "waiting": state.num_waiting,
            "block_size": info.block_size,
            "blocks": state.num_blocks,
            "blocks_used": state.num_blocks_used,
            "preempted": state.num_preempted,
            "blocks_saved": state.num_blocks_saved,
            "blocks_restored": state.num_blocks_restored,
            "adapters": self.engine.adapters,
        }


def to_tensor(rows: Sequence[Sequence[int]], device: torch.device | None) -> Tensor:
    """A padded tensor [B, T]."""
    length = max(map(len, rows))
    padded = [[*row, *[PAD] * (length - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.long, device=device)


def rows_of(ids: Tensor) -> list[list[int]]:
    """The tokens of each row of [T] or [B, T], without padding."""
    if ids.dim() not in (1, 2):
        raise HandlerError(f"tokens must be a tensor [T] or [B, T], not one with {ids.dim()} dimensions")
    rows: list[list[int]] = (ids if ids.dim() == 2 else ids[None]).tolist()
    return [[token for token in row if token != PAD] for row in rows]
