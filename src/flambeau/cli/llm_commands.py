"""`flambeau llm …`: what it is told; the work lives in modules of its own, loaded when used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flambeau.cli.options import DEFAULT_INFERENCE, Inference, Json

llm_app = typer.Typer(help="Serve, try and measure language models.", no_args_is_help=True, rich_markup_mode=None)


@llm_app.command("serve")
def llm_serve(
    checkpoint: Annotated[Path, typer.Argument(help="A Hugging Face folder, gpt-fast's model.pth, or ours.")],
    name: Annotated[str | None, typer.Option(help="The name clients ask for; else the folder's.")] = None,
    draft: Annotated[Path | None, typer.Option(help="A smaller model that drafts tokens ahead.")] = None,
    speculate_k: Annotated[int | None, typer.Option(min=1, max=16, help="Tokens drafted ahead; else 5.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer that is not beside the checkpoint.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    quantization: Annotated[str | None, typer.Option(help="int8, int4 or fp8, applied on load.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences that run at a time.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Tokens of one sequence.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Processes, or GPUs, that share the model.")] = 1,
    compile: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Compile beside serving.")] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume", help="Go on with a text when the worker that made it died.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The inference API's port; 0: any free one.")] = 8080,
    management_port: Annotated[int, typer.Option(min=0, max=65535, help="The management API's port.")] = 8081,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="The metrics API's port; 0: no such API.")] = 8082,
    require_token: Annotated[
        bool | None,
        typer.Option("--require-token/--no-token", help="Ask for keys; by default on all but loopback addresses."),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a checkpoint: predictions, streams and the OpenAI API, until SIGTERM or Ctrl-C."""
    from flambeau.cli import llm_serve as work
    from flambeau.config.server import Address, KeysConfig, MetricsConfig, ServerConfig

    config = ServerConfig(
        inference=Address(host, port),
        management=Address(host, management_port),
        metrics=Address(host, metrics_port) if metrics_port else None,
        keys=KeysConfig(is_on=require_token),
        measure=MetricsConfig(auto_detect=True),
    )
    flags = work.ServeFlags(
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
    prompt: Annotated[str | None, typer.Argument(help="One message; none: a conversation.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name; needed where there are several.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before everything else.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: the likeliest words each time.")] = 0.8,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 512,
    url: Inference = DEFAULT_INFERENCE,
) -> None:
    """Talk with a model of a running server; answers appear as they are made."""
    from flambeau.cli import llm_chat as work

    options = {"temperature": temperature, "max_tokens": max_tokens}
    work.chat(url, model, system=system, options=options, prompt=prompt)


@llm_app.command("bench")
def llm_bench(
    target: Annotated[str, typer.Argument(help="A server's address, or a checkpoint.")] = DEFAULT_INFERENCE,
    model: Annotated[str | None, typer.Option(help="The model's name; needed where a server has several.")] = None,
    streams: Annotated[str, typer.Option(help="How many at a time, one row each.")] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    draft: Annotated[Path | None, typer.Option(help="For a checkpoint: a model that drafts tokens ahead.")] = None,
    as_json: Json = False,
) -> None:
    """Measure tokens per second and the time to the first one."""
    from flambeau.cli import llm_bench as work

    try:
        numbers = [int(part) for part in streams.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter("write numbers from 1, with commas between", param_hint="--streams")
    load = work.BenchParams(streams=numbers, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    options = {} if draft is None else {"draft": str(draft)}
    work.bench(target, model, load, options=options, as_json=as_json)


@llm_app.command("quantize")
def llm_quantize(
    checkpoint: Annotated[Path, typer.Argument(help="A Hugging Face folder.")],
    into: Annotated[Path, typer.Argument(help="A new folder.")],
    kind: Annotated[str, typer.Option(help="int8, int4 or fp8.")] = "int8",
    group_size: Annotated[int, typer.Option(min=16, help="For int4: weights that share a scale.")] = 64,
    text: Annotated[Path | None, typer.Option(help="Tell the perplexity on this text, before and after.")] = None,
) -> None:
    """Write a checkpoint anew with smaller weights."""
    from flambeau.cli import llm_quantize as work

    work.quantize(checkpoint, into, kind, group_size=group_size, text=text)
