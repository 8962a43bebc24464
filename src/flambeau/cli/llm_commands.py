"""The arguments of `flambeau llm …`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from flambeau.cli.options import DEFAULT_INFERENCE, EPILOG, Inference, Json, LlmSettingsCommand, settings_of

llm_app = typer.Typer(
    help="Serve, chat with, measure and quantize language models.", no_args_is_help=True, rich_markup_mode=None
)

DRAFT_HELP = "Smaller checkpoint, or head (EAGLE, DFlash), that drafts tokens (speculative decoding)."


@llm_app.command("serve", cls=LlmSettingsCommand, epilog=EPILOG)
def llm_serve(
    ctx: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(help="Hugging Face folder, GGUF file, model of the hub (org/name), or model.pth of gpt-fast."),
    ],
) -> None:
    """Serve a checkpoint with the OpenAI API.

    The server runs until SIGTERM or Ctrl-C. The prediction API is available, too.
    """
    gc.disable()  # until the server listens
    from flambeau.cli import llm_serve as work
    from flambeau.config.value_types import read_model_path

    work.serve_settings(read_model_path(checkpoint), settings_of(ctx))


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
    target: Annotated[
        str, typer.Argument(envvar="FLAMBEAU_URL", help="Address of a server, or a checkpoint.")
    ] = DEFAULT_INFERENCE,
    model: Annotated[str | None, typer.Option(help="Model name; required if the server has several.")] = None,
    streams: Annotated[str, typer.Option(help="Numbers of concurrent streams, one row each.")] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    draft: Annotated[
        Path | None, typer.Option(help=f"For a checkpoint: {DRAFT_HELP[:1].lower()}{DRAFT_HELP[1:]}")
    ] = None,
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
    calibrate: Annotated[
        Path | None, typer.Option(help="For int4: text file; weights are chosen for its inputs (GPTQ).")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="flambeau, or compressed-tensors, which vLLM reads.")
    ] = "flambeau",
) -> None:
    """Write a checkpoint with quantized weights."""
    from flambeau.cli import llm_quantize as work

    work.quantize(checkpoint, into, kind, group_size=group_size, text=text, calibrate=calibrate, form=form)
