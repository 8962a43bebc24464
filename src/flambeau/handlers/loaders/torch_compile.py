"""torch.compile with the `pt2` options of a model-config; a model that cannot be compiled runs eagerly."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flambeau.errors import HandlerError, suggest
from flambeau.handlers.loaders.compile_backends import PT2Backend, check_valid_pt2_backend

logger = logging.getLogger(__name__)

Options = dict[str, Any]
LOCK_TIMEOUT_S = 60.0  # how long to wait for another worker that compiles
SLOW_S = 0.5  # a first call that takes longer is logged as a compilation


def read_pt2(section: Any) -> Options | None:
    """The arguments of torch.compile; None if the model is not to be compiled."""
    if section is None:
        return None
    if isinstance(section, str):
        return {"backend": section}
    if not isinstance(section, dict):
        raise HandlerError("pt2 should be str or dict")
    if "compile" in section:
        inner = section["compile"]
        if not isinstance(inner, dict) or "enable" not in inner:
            raise HandlerError("pt2: compile needs `enable: true` or `enable: false`")
        return {key: value for key, value in inner.items() if key != "enable"} if inner["enable"] else None
    return None if "export" in section else dict(section)


def compile_model(model: Any, options: Options) -> Any:
    """The compiled module, which compiles at its first call; the model itself, with a warning, if it cannot be."""
    backend = options.get("backend")
    if backend is not None and not check_valid_pt2_backend(backend):
        near = suggest(str(backend), [known.value for known in PT2Backend])
        hint = f"did you mean {near}?" if near else "torch.compiler.list_backends() has those of this machine"
        logger.warning("the model is not compiled: there is no backend %r; %s", backend, hint)
        return model
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        logger.warning("the model is not compiled: a %s is already compiled", type(model).__name__)
        return model
    if folder := cache_folder():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    # torch logs a traceback for each input of a wrong shape; the client already gets a 400 for it.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        compiled: Any = torch.compile(model, **options)  # a module around the model; it has its attributes
        compiled.forward = CompiledCall(model, compiled, compiled.forward, is_dynamic="dynamic" not in options)
    except Exception as error:
        logger.warning("the model is not compiled: %s", error)
        return model
    words = ", ".join(f"{key} {value}" for key, value in options.items()) or "the defaults of torch.compile"
    logger.info("Compiled model with %s", words)
    return compiled


class CompiledCall:
    """Calls the compiled model; compiles once for all batch sizes, and falls back to eager calls on failure."""

    def __init__(
        self, model: torch.nn.Module, module: torch.nn.Module, compiled: Callable[..., Any], *, is_dynamic: bool
    ) -> None:
        self._model = model
        self._module = module  # the one that calls this
        self._compiled = compiled
        self._is_dynamic = is_dynamic
        self._seen: set[Any] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = kind_of_call(args, kwargs)
        if kind in self._seen:
            return self._run(args, kwargs)
        began = time.perf_counter()
        with compile_lock(cache_folder()):
            result = self._run(args, kwargs)
        self._seen.add(kind)
        if (elapsed := time.perf_counter() - began) > SLOW_S:
            logger.info("compiled for inputs like %s in %.1f s", describe(args), elapsed)
        return result

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._is_dynamic:
            for tensor in args:
                if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[0] > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)  # one compilation for every batch size
        try:
            return self._compiled(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            result = self._model(*args, **kwargs)  # if this fails too, the input is the cause
            self._module.forward = self._model.__call__
            logger.warning("the model runs eagerly from now on: %s: %s", type(error).__name__, summary(error))
            return result


def kind_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A key for calls that share a compilation: only batch sizes above one may differ."""
    tensors = [*args, *kwargs.values()]
    return tuple((t.dtype, t.shape[:1] == (1,), t.shape[1:]) for t in tensors if isinstance(t, torch.Tensor))


def describe(args: tuple[Any, ...]) -> str:
    return ", ".join(str(tuple(t.shape)) for t in args if isinstance(t, torch.Tensor)) or "these"


def summary(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500]


def cache_folder() -> Path | None:
    """The cache of compiled code, shared by workers and restarts; None for torch's default."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    try:
        folder = Path(named) if named else user_cache() / "flambeau" / "inductor"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # Path.home() raises RuntimeError for a user without a home
        return None
    return folder if os.access(folder, os.W_OK) else None


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@contextmanager
def compile_lock(folder: Path | None, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Let one worker compile at a time, so that the others find the result in the cache.

    After `timeout_s` the caller goes on without the lock.
    """
    lock = open_lock(folder)
    if lock is None:
        yield
        return
    deadline = time.monotonic() + timeout_s
    try:
        while not try_lock(lock) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # unlock explicitly: a child process of the compiler may keep the file open
        os.close(lock)


def open_lock(folder: Path | None) -> int | None:
    """The lock file; None if it cannot be created."""
    if folder is None:
        return None
    try:
        return os.open(folder / f"compiling-{os.getuid()}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def try_lock(lock: int) -> bool:
    """Whether the lock was taken; true on file systems without locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
