"""Dependencies: builds and caches Python environments for models with requirements of their own."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import site
import sys
import sysconfig
import venv
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from flambeau.config.server import SECRET_VARIABLES
from flambeau.errors import DependenciesFailed
from flambeau.serving import subprocesses
from flambeau.serving.model_sources.shared_packages import (
    NESTED,
    SHARED,
    PinConflict,
    find_conflicts,
    shared_versions,
    without_lines,
)

logger = logging.getLogger(__name__)

BUILD_S = 3600
POLL_S = 0.1
KEPT_LINES = 20
COMPLETE = "complete"
# These variables would send packages elsewhere than into the new environment.
FOREIGN = ("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_ROOT", "PIP_PYTHON", "PIP_CONSTRAINT", "PYTHONHOME")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonEnvironment:
    """The interpreter of a model's workers, and packages that come before those of the server."""

    python: str = sys.executable
    packages: Path | None = None

    def extend(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The variables of a worker, with these packages on its path."""
        if self.packages is None:
            return dict(variables)
        path = os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), str(self.packages)]))
        return {**variables, "PYTHONPATH": path}


SERVER_ENVIRONMENT = PythonEnvironment()


class Dependencies:
    """Builds environments in a cache that the servers of one user share."""

    def __init__(
        self,
        *,
        install: bool,
        tell: Callable[[str, str], None],
        cache: Path | None = None,
        ignore_shared_pins: bool = False,
    ) -> None:
        self._install = install
        self._ignores_pins = ignore_shared_pins
        self._tell = tell  # gets a model and a line of progress
        self._cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flambeau"

    async def prepare(self, model: str, folder: Path, named: str | None, *, use_venv: bool) -> PythonEnvironment:
        """The environment of a model's workers; it is built unless an equal one is in the cache."""
        if not use_venv and not (self._install and named):
            return SERVER_ENVIRONMENT
        failure = f"Custom pip package installation failed for model {model}"
        requirements = self._requirements(folder, named, failure) if self._install and named else None
        try:
            key = await asyncio.to_thread(lambda: key_of(requirements, folder, base()))
            conflicts = await asyncio.to_thread(conflicts_in, requirements) if requirements else []
            if conflicts and not self._ignores_pins:
                raise DependenciesFailed(failure, cause=explain_conflicts(named or "", conflicts))
            for conflict in conflicts:
                logger.warning("%s: %s: %s; the line is ignored (ignore_shared_pins)", model, named, conflict)
            place = self._cache / "environments" / key
            async with locked(place, model):
                if not (place / COMPLETE).exists():
                    left_out = [conflict.number for conflict in conflicts]
                    await self._build(model, place, folder, requirements, failure, left_out)
        except OSError as error:
            text = f"Virtual environment creation failed for model {model}"
            raise DependenciesFailed(text, cause=f"{error}; set XDG_CACHE_HOME to another folder") from None
        if use_venv:
            return PythonEnvironment(python=str(python_in(place)))
        return PythonEnvironment(packages=packages_in(place))

    @staticmethod
    def _requirements(folder: Path, named: str, failure: str) -> Path:
        path = folder / named
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            raise DependenciesFailed(failure, cause=f"its manifest names {named}, which is not in the archive")
        return path

    async def _build(
        self,
        model: str,
        place: Path,
        folder: Path,
        requirements: Path | None,
        failure: str,
        left_out: Sequence[int] = (),  # lines
    ) -> None:
        logger.info("%s: building its Python environment in %s", model, place)
        await asyncio.to_thread(create, place)
        if requirements is not None and left_out:
            requirements = await asyncio.to_thread(reduce, requirements, left_out, place)
        if requirements is not None:
            command = [
                *pip(),
                *("--python", str(python_in(place)), "install", "--no-input", "--disable-pip-version-check"),
                *("--progress-bar", "off", "--upgrade-strategy", "only-if-needed"),
                *("--constraint", str(place / "constraints.txt"), "--requirement", str(requirements)),
            ]
            status, lines = await run(command, folder, lambda line: self._on_line(model, line))
            if status:
                logger.error("%s: its requirements could not be installed", model)
                await asyncio.to_thread(shutil.rmtree, place, True)
                raise DependenciesFailed(failure, cause="\n".join(lines))
        (place / COMPLETE).touch()
        logger.info("%s: its Python environment is ready", model)

    def _on_line(self, model: str, line: str) -> None:
        logger.info("%s: pip: %s", model, line)
        self._tell(model, line.strip())


def base() -> list[str]:
    """What an environment depends on besides its requirements: this Python and its installed packages."""
    installed = sorted({f"{name}=={version}" for name, version in distributions()})
    return [sys.version, sys.executable, platform.platform(), *installed]


def distributions() -> list[tuple[str, str]]:
    """The names and versions of the installed packages."""
    from importlib import metadata  # here: it takes 7 ms, and few servers need it

    found = ((dist.metadata["Name"], dist.version) for dist in metadata.distributions())
    return [(name, version) for name, version in found if name and version]


def conflicts_in(requirements: Path) -> list[PinConflict]:
    return find_conflicts(requirements.read_text(errors="replace"), shared_versions(distributions()))


def reduce(requirements: Path, left_out: Sequence[int], place: Path) -> Path:
    """Write the requirements without these lines into the environment's folder."""
    reduced = place / "requirements.txt"
    reduced.write_text(without_lines(requirements.read_text(errors="replace"), left_out, requirements.parent))
    return reduced


def explain_conflicts(file: str, conflicts: Sequence[PinConflict]) -> str:
    found = "; ".join(map(str, conflicts))
    return f"{file}: {found}. Change it, or let the server ignore such lines: ignore_shared_pins=true"


def create(place: Path) -> None:
    """Create an environment that inherits the server's packages, so that these are not installed again."""
    shutil.rmtree(place, ignore_errors=True)
    venv.EnvBuilder(symlinks=True, with_pip=False).create(place)
    folders = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    if site.ENABLE_USER_SITE:
        folders[site.getusersitepackages()] = None
    # `addsitedir` also follows the links of packages that are installed for development.
    lines = [f"import site; site.addsitedir({folder!r})" for folder in folders]
    (packages_in(place) / "inherited-site-packages.pth").write_text("\n".join([*lines, ""]))
    (place / "constraints.txt").write_text("\n".join([*constraints(distributions()), ""]))


def python_in(place: Path) -> Path:
    return place / "bin" / "python"


def packages_in(place: Path) -> Path:
    return place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def pip() -> list[str]:
    """The command that runs pip: the installed one, or the one bundled with Python."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    bundled = sorted(Path(spec.origin).parent.glob("_bundled/pip-*.whl")) if spec and spec.origin else []
    if not bundled:
        raise FileNotFoundError("pip is not installed; install it in the environment of the server")
    return [sys.executable, str(bundled[-1] / "pip")]


async def run(command: list[str], folder: Path, on_line: Callable[[str], None]) -> tuple[int, list[str]]:
    """Run a command in a folder, with `on_line` for each line of output; return its status and last lines."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        # No secrets: a package may run code when it is installed.
        env={key: value for key, value in os.environ.items() if key not in FOREIGN and key not in SECRET_VARIABLES},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    last: deque[str] = deque(maxlen=KEPT_LINES)
    try:
        async with asyncio.timeout(BUILD_S):
            async for raw in process.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                last.append(line)
                on_line(line)
            return await process.wait(), list(last)
    except TimeoutError:
        return 1, [*last, f"it took longer than {BUILD_S} s"]
    except ValueError:  # a line is longer than the buffer of a stream
        return 1, [*last, "pip printed a line that is too long"]
    finally:
        if process.returncode is None:
            await subprocesses.kill(process)


@asynccontextmanager
async def locked(place: Path, model: str) -> AsyncIterator[None]:
    """Hold an environment's lock, so that only one server builds it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        is_logged = False
        while not take(fd):
            if not is_logged:
                logger.info("%s: its Python environment is being built; waiting", model)
                is_logged = True
            await asyncio.sleep(POLL_S)
        yield
    finally:
        os.close(fd)


def take(fd: int) -> bool:
    """Try to lock a file; return whether it is locked now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


WORD = re.compile(r"[^\s=@;,]+")


def constraints(installed: Iterable[tuple[str, str]]) -> list[str]:
    """The versions of packages that a model must share with the server."""
    return sorted(f"{name}=={version}" for name, version in installed if SHARED.fullmatch(name))


def key_of(requirements: Path | None, folder: Path, base: Iterable[str]) -> str:
    """A key that is equal for the same requirements and local files on the same installation."""
    digest = hashlib.sha256()
    for word in base:
        digest.update(word.encode() + b"\0")
    for path in sorted(set(files_of(requirements, folder))) if requirements else ():
        digest.update(b"\0file\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def files_of(requirements: Path, folder: Path, *, depth: int = 5) -> Iterator[Path]:
    """A requirements file and the files in the archive that it names: wheels, folders of wheels, further lists."""
    yield requirements
    for line in requirements.read_text(errors="replace").splitlines():
        nested = NESTED.match(line)
        for word in WORD.findall(line.partition(" #")[0]):
            path = (folder / word.removeprefix("file:").partition("#")[0]).resolve()
            if not path.is_relative_to(folder.resolve()):
                continue
            if nested and path.is_file() and path != requirements.resolve() and depth:
                yield from files_of(path, folder, depth=depth - 1)
            elif path.is_file():
                yield path
            elif path.is_dir() and path != folder.resolve():
                yield from (file for file in path.rglob("*") if file.is_file())
