"""The arguments of `flambeau llm …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flambeau.cli.options import (
    DEFAULT_INFERENCE,
    DEFAULT_KEY_FILE,
    AllowUnprotected,
    Host,
    Inference,
    Json,
    KeyExpiry,
    KeyFile,
    LogLevel,
    ManagementPort,
    MetricsPort,
    Port,
    RequireToken,
)

llm_app = typer.Typer(
    help="Serve, chat with, measure and quantize language models.", no_args_is_help=True, rich_markup_mode=None
)

DRAFT_HELP = "Smaller checkpoint that drafts tokens (speculative decoding)."


@llm_app.command("serve")
def llm_serve(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face folder, or model.pth of gpt-fast.")],
    name: Annotated[str | None, typer.Option(help="Model name for clients. Default: the folder's name.")] = None,
    draft: Annotated[Path | None, typer.Option(help=DRAFT_HELP)] = None,
    speculate_k: Annotated[int | None, typer.Option(min=1, max=16, help="Drafted tokens per step. Default: 5.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer, if it is not in the checkpoint.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16. Default: float32 on a CPU, the checkpoint's on a GPU."),
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="Quantize on load: int8, int4 or fp8.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Maximum number of running sequences.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Maximum number of tokens per sequence.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Number of processes (GPUs) that share the model.")] = 1,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile in the background while serving.")
    ] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume", help="Continue a generation on another worker if its worker dies.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    management_port: ManagementPort = 8081,
    metrics_port: MetricsPort = 8082,
    require_token: RequireToken = None,
    key_file: KeyFile = DEFAULT_KEY_FILE,
    key_expiry: KeyExpiry = None,
    allow_unprotected: AllowUnprotected = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve a checkpoint with the OpenAI API.

    The server runs until SIGTERM or Ctrl-C. The prediction API is available, too.
    """
    from flambeau.cli import llm_serve as work
    from flambeau.config.server import Address, KeysConfig, MetricsConfig, ServerConfig

    config = ServerConfig(
        inference=Address(host, port),
        management=Address(host, management_port),
        metrics=Address(host, metrics_port) if metrics_port else None,
        keys=KeysConfig(is_on=require_token, file=key_file, expiry_s=key_expiry),
        allow_unprotected=allow_unprotected,
        names_json=True,
        plain_errors=True,
        measure=MetricsConfig(auto_detect=True),
    )
    flags = work.LlmServeFlags(
        model_path=checkpoint,
        draft_model_path=draft,
        tokenizer_path=tokenizer,
        dtype=dtype,
        quantization=quantization,
        speculate_k=speculate_k,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        compile=compile,
        resume=resume,
    )
    work.serve(config, flags, name=name, ranks=tensor_parallel, log_level=log_level)


@llm_app.command("chat")
def llm_chat(
    prompt: Annotated[str | None, typer.Argument(help="One message; without it, an interactive chat.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name; required if the server has several.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="Randomness; 0 always picks the most likely token.")
    ] = 0.8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in an answer.")] = 512,
    url: Inference = DEFAULT_INFERENCE,
) -> None:
    """Chat with a model of a running server."""
    from flambeau.cli import llm_chat as work

    options = {"temperature": temperature, "max_tokens": max_tokens}
    work.chat(url, model, system=system, options=options, prompt=prompt)


@llm_app.command("bench")
def llm_bench(
    target: Annotated[str, typer.Argument(help="Address of a server, or a checkpoint.")] = DEFAULT_INFERENCE,
    model: Annotated[str | None, typer.Option(help="Model name; required if the server has several.")] = None,
    streams: Annotated[str, typer.Option(help="Numbers of concurrent streams, one row each.")] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    draft: Annotated[Path | None, typer.Option(help=f"For a checkpoint: {DRAFT_HELP.lower()}")] = None,
    as_json: Json = False,
) -> None:
    """Measure tokens per second and the time to the first token."""
    from flambeau.cli import llm_bench as work

    try:
        numbers = [int(part) for part in streams.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{streams!r} must be positive numbers, separated by commas", param_hint="--streams")
    params = work.BenchParams(streams=numbers, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    options = {} if draft is None else {"draft": str(draft)}
    work.bench(target, model, params, options=options, as_json=as_json)


@llm_app.command("quantize")
def llm_quantize(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face folder.")],
    into: Annotated[Path, typer.Argument(help="New folder for the quantized checkpoint.")],
    kind: Annotated[str, typer.Option(help="int8, int4 or fp8.")] = "int8",
    group_size: Annotated[int, typer.Option(min=16, help="For int4: number of weights that share a scale.")] = 64,
    text: Annotated[Path | None, typer.Option(help="Text file; print the perplexity on it before and after.")] = None,
) -> None:
    """Write a checkpoint with quantized weights."""
    from flambeau.cli import llm_quantize as work

    work.quantize(checkpoint, into, kind, group_size=group_size, text=text)
