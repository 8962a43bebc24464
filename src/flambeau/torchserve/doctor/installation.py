"""`flambeau doctor --torchserve`: the configuration, then every model: handlers, imports, settings, weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from flambeau.archive import packages
from flambeau.archive.manifest import BUILT_IN, MANIFEST, UNSUPPORTED, Manifest, manifest_of, parse_manifest
from flambeau.archive.reader import DEFAULT_LIMITS, read_chunks, read_entries
from flambeau.cli.doctor import Finding, Level, compiler, gpus, import_problems, reinstall_line
from flambeau.config.model import ModelConfig
from flambeau.errors import BrokenArchive, ConfigError, FlambeauError
from flambeau.serving.model_sources.dependencies import distributions
from flambeau.serving.model_sources.shared_packages import find_conflicts, shared_versions
from flambeau.torchserve.doctor.configuration import check_config, warnings_of
from flambeau.torchserve.doctor.handler_class import missing_method
from flambeau.torchserve.doctor.imports import PACKAGES, Import, imports_of, is_installed, missing_name, own_modules
from flambeau.torchserve.doctor.pickled_weights import names_in_weights

READ_SUFFIXES = (".py", ".yaml", ".yml", ".txt", ".json")
READ_BYTES = 1 << 20
HOME = Path(__file__).parents[3]  # the folder of `flambeau` and `ts`
COMPATIBLE = ("ts", "model_archiver", "workflow_archiver")
NEEDS = {  # the imports of built-in handlers, and of modules that handlers import
    **{name: group.modules for name, group in packages.NEEDS.items()},
    "vision_handler": packages.VISION.modules,
    "text_handler": packages.TORCH.modules,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of an archive or model folder: all names, and the small text files."""

    names: frozenset[str]
    files: Mapping[str, bytes]
    manifest: Manifest | None


def check_model(path: Path, *, installs: bool, ignores_pins: bool = False) -> Iterator[Finding]:
    """The findings about one model; `installs` is whether the server installs requirements."""
    try:
        contents = read_folder(path) if path.is_dir() else read_archive(path)
    except FlambeauError as error:
        yield Finding("problem", path.name, str(error))
        return
    findings = [
        *check_contents(contents, installs=installs),
        *check_pins(contents, installs=installs, ignores_pins=ignores_pins),
        *check_weights(path, contents),
    ]
    if all(finding.level == "ok" for finding in findings):
        named = contents.manifest.handler if contents.manifest else ""
        yield Finding("ok", path.name, f"will work ({named})" if named else "will work")
    yield from (replace(f, what=f"{path.name}: {f.what}") for f in findings if f.level != "ok")


def read_archive(path: Path) -> Contents:
    """Read a `.mar` or `.tar.gz` without unpacking it."""
    names, files = set(), {}
    for item in read_entries(path, DEFAULT_LIMITS):
        names.add(item.name)
        if item.kind == "file" and item.name.endswith(READ_SUFFIXES) and item.size_bytes <= READ_BYTES:
            files[item.name] = b"".join(read_chunks(item, at_most=READ_BYTES))
    top = f"{path.name.removesuffix('.tar.gz')}/"
    if path.name.endswith(".tar.gz") and all(name.startswith(top) or name == top[:-1] for name in names):
        names = {name.removeprefix(top) for name in names}
        files = {name.removeprefix(top): content for name, content in files.items()}
    manifest = parse_manifest(files[MANIFEST], MANIFEST) if MANIFEST in files else None
    return Contents(names=frozenset(names), files=files, manifest=manifest)


def read_folder(path: Path) -> Contents:
    paths = [file for file in path.rglob("*") if file.is_file()]
    names = {file.relative_to(path).as_posix(): file for file in paths}
    try:
        files = {
            name: file.read_bytes()
            for name, file in names.items()
            if name.endswith(READ_SUFFIXES) and file.stat().st_size <= READ_BYTES
        }
    except OSError as error:
        raise BrokenArchive(f"{error.filename} cannot be read: {error.strerror}") from None
    return Contents(names=frozenset(names), files=files, manifest=manifest_of(path))


def check_contents(contents: Contents, *, installs: bool) -> Iterator[Finding]:
    """Everything that might not work."""
    manifest = contents.manifest
    if manifest is None:
        yield Finding("note", "manifest", "missing: name the model and its handler in the register call")
    else:
        yield from check_manifest(manifest, contents.names)
        yield from check_options(manifest, contents.files)
        yield from check_needs(manifest)
        yield from check_handler_class(manifest.handler, contents.files)
    wanted = requirements_of(contents)
    yield from check_requirements(wanted, installs=installs)
    wanted = wanted if installs else frozenset()
    for name, content in sorted(contents.files.items()):
        if name.endswith(".py"):
            yield from check_code(name, content, own_modules(contents.files), wanted)


def check_manifest(manifest: Manifest, names: frozenset[str]) -> Iterator[Finding]:
    """Whether the files and the handler that the manifest names exist."""
    if manifest.runtime == "LSP":
        yield Finding("problem", "runtime", "LSP is TorchServe's C++ backend; here models run in Python")
    handler = manifest.handler
    if reason := UNSUPPORTED.get(handler):
        yield Finding("problem", "handler", f"{handler}: {reason}")
    elif handler and handler not in BUILT_IN and not is_built_in_path(handler):
        file = Path(handler.partition(":")[0]).name.removesuffix(".py") + ".py"
        if file not in names and not is_installed(file.removesuffix(".py")):
            yield Finding("problem", "handler", f"{handler} is neither in the archive nor a built-in handler")
    for named in (manifest.serialized_file, manifest.model_file, manifest.config_file, manifest.requirements_file):
        if named and named not in names:
            yield Finding("problem", "manifest", f"it names {named}, which is not in the archive")


def check_handler_class(handler: str, files: Mapping[str, bytes]) -> Iterator[Finding]:
    """Whether the class of a handler has its two methods, as far as its source tells."""
    if not handler or ":" in handler or handler in BUILT_IN:
        return
    name = Path(handler).name.removesuffix(".py") + ".py"
    if name in files and (reason := missing_method(files[name])):
        yield Finding("problem", name, reason)


def check_needs(manifest: Manifest) -> Iterator[Finding]:
    """Whether the libraries of a built-in handler are installed."""
    for package in NEEDS.get(manifest.handler, ()):
        if not is_installed(package):
            name = packages.distribution_of(package)
            text, fix = f"{manifest.handler} needs {package}", f"pip install {name}"
            yield Finding("problem", "handler", f"{text}: {fix}", fix)


def check_weights(path: Path, contents: Contents) -> Iterator[Finding]:
    """Whether the weights contain more than tensors; such files load only with `weights_only: false`."""
    manifest = contents.manifest
    if (
        manifest is None
        or not manifest.serialized_file
        or b"weights_only: false" in contents.files.get(manifest.config_file or "", b"")
    ):
        return
    if names := names_in_weights(path, manifest.serialized_file):
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        remedy = "put weights_only: false into its model-config, or weights_only=false into config.properties"
        level: Level = "problem" if manifest.handler in BUILT_IN else "note"
        yield Finding(
            level, manifest.serialized_file, f"it holds more than weights ({shown}); if you trust it, {remedy}"
        )


def is_built_in_path(handler: str) -> bool:
    """Whether the handler is a module of `ts.torch_handler`."""
    return missing_name(f"ts.torch_handler.{handler.partition(':')[0]}", None, HOME) is None


def check_options(manifest: Manifest, files: Mapping[str, bytes]) -> Iterator[Finding]:
    """Invalid settings in the model-config."""
    content = files.get(manifest.config_file or "")
    if content is None:
        return
    try:
        options: Any = yaml.safe_load(content)
    except yaml.YAMLError as error:
        yield Finding("problem", manifest.config_file or "", f"it is not valid YAML: {error}")
        return
    if not isinstance(options, Mapping | None):
        yield Finding("problem", manifest.config_file or "", "it must hold a mapping of settings")
        return
    with warnings_of("flambeau.config") as warnings:
        ModelConfig().with_options(options or {})
    yield from (Finding("note", manifest.config_file or "", text) for text in warnings)


def requirements_of(contents: Contents) -> frozenset[str]:
    """The packages that the model's requirements name, in lower case."""
    named = contents.manifest.requirements_file if contents.manifest else None
    lines = contents.files.get(named or "", b"").decode("utf-8", "replace").splitlines()
    return frozenset(name for line in lines if (name := requirement_name(line)))


def requirement_name(line: str) -> str | None:
    """The package of a requirements line: by its name, a file name, or the `#egg=` of a URL."""
    line = line.strip()
    if not line or line.startswith(("#", "-")):
        return None
    if egg := re.search(r"#egg=([\w.-]+)", line):
        name = egg[1]
    elif " @ " not in line and (file := re.search(r"([\w.]+?)-\d[^/\\]*\.(?:whl|tar\.gz|zip)\b", line)):
        name = file[1]
    elif plain := re.match(r"[A-Za-z0-9][\w.-]*(?![\w+:/])", line):
        name = plain[0]
    else:
        return None
    return name.lower().replace("_", "-")


def check_requirements(wanted: frozenset[str], *, installs: bool) -> Iterator[Finding]:
    """Requirements that will not be installed."""
    if wanted and not installs:
        text = "set install_py_dep_per_model=true in config.properties"
        yield Finding("note", "requirements", f"{', '.join(sorted(wanted))} will not be installed: {text}")


def check_pins(contents: Contents, *, installs: bool, ignores_pins: bool) -> Iterator[Finding]:
    """Requirements that want another version of a package that all models share with the server."""
    named = contents.manifest.requirements_file if contents.manifest else None
    text = contents.files.get(named or "", b"").decode("utf-8", "replace")
    for conflict in find_conflicts(text, shared_versions(distributions())):
        if not installs or ignores_pins:
            yield Finding("note", named or "", f"{conflict}; the line is not followed")
        else:
            fix = "ignore_shared_pins=true  # in config.properties, or change the line"
            yield Finding("problem", named or "", str(conflict), fix)


def modules_of(path: Path) -> set[str]:
    """The installed modules that a model's handler and code import."""
    try:
        contents = read_folder(path) if path.is_dir() else read_archive(path)
    except FlambeauError:
        return set()
    found = {*NEEDS.get(contents.manifest.handler, ())} if contents.manifest else set()
    for name, content in contents.files.items():
        if name.endswith(".py"):
            try:
                found |= {one.module.partition(".")[0] for one in imports_of(content.decode())}
            except (SyntaxError, ValueError):
                continue
    found -= {*sys.stdlib_module_names, *own_modules(contents.files), *COMPATIBLE, "flambeau"}
    return {module for module in found if is_installed(module)}


def check_imports(paths: Sequence[Path]) -> Iterator[Finding]:
    """Installed packages that the models of a store use and that cannot be imported."""
    modules = sorted(set[str]().union(*map(modules_of, paths)))
    for module, problem in import_problems(modules).items():
        package = packages.distribution_of(module)
        text = f"installed, but it cannot be imported: {problem}"
        yield Finding("problem", module, text, reinstall_line(package))


def check_code(name: str, content: bytes, own: set[str], wanted: frozenset[str]) -> Iterator[Finding]:
    """Whether a Python file parses, and whether its imports resolve."""
    try:
        imports = [*imports_of(content.decode())]
    except (SyntaxError, ValueError) as error:
        yield Finding("problem", name, f"not valid Python for this version: {error}")
        return
    for one in imports:
        if (lack := missing_import(one, own, wanted)) and not one.is_optional:
            yield Finding("problem", f"{name}, line {one.line}", lack, install_fix(lack))


def install_fix(lack: str) -> str:
    """The command in the words about a missing import; empty if there is none."""
    found = re.search(r"pip install [\w.-]+", lack)
    return found[0] if found else ""


def missing_import(one: Import, own: set[str], wanted: frozenset[str]) -> str | None:
    """The missing part of an import, and the remedy."""
    top = one.module.partition(".")[0]
    if top in own:
        return None
    if top in COMPATIBLE:
        missing = missing_name(one.module, one.name, HOME)
        if missing:
            return f"it imports {missing}, which is not part of the compatible interface"
        absent = [need for need in NEEDS.get(one.module.rpartition(".")[2], ()) if not is_installed(need)]
        return f"it imports {one.module}, which needs {', '.join(absent)}: pip install it" if absent else None
    package = PACKAGES.get(top, top.replace("_", "-")).lower()
    if is_installed(top) or any(name == package or name.startswith(f"{package}-") for name in wanted):
        return None
    return f"it imports {top}: pip install {package}, or name it in the archive's requirements"


def examine_installation(config: Path, store: Path) -> Iterator[Finding]:
    """Check the configuration, then every model and workflow in the store."""
    if not store.is_dir():
        raise ConfigError(f"{store} is not a folder; name the model store after the configuration file")
    findings, server = check_config(config, store)
    yield from findings
    yield from gpus()
    yield compiler()
    paths = [path for path in sorted(store.iterdir()) if is_model(path)]
    if not paths:
        yield Finding("note", str(store), "there are no models in it")
    num_problems = 0
    for path in paths:
        for finding in check_model(path, installs=server.install_dependencies, ignores_pins=server.ignore_shared_pins):
            num_problems += finding.level == "problem"
            yield finding
    for finding in check_imports(paths):
        num_problems += 1
        yield finding
    text = f"{len(paths)} model{'s' * (len(paths) != 1)}, {num_problems} problem{'s' * (num_problems != 1)}"
    yield Finding("note" if num_problems else "ok", str(store), text)


def is_model(path: Path) -> bool:
    """Whether an entry of a store is a model, by its name."""
    if path.name.startswith("."):
        return False
    return path.is_dir() or path.name.endswith((".mar", ".model", ".tar.gz"))
