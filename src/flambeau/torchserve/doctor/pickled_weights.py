"""The names that a weights file would import, read from its pickle without running it."""

from __future__ import annotations

import pickletools
import tempfile
import zipfile
from pathlib import Path

from flambeau.archive.reader import DEFAULT_LIMITS, read_chunks, read_entries

# Names that `torch.load(weights_only=True)` accepts; others need `weights_only: false`.
_PLAIN = {
    "collections.OrderedDict",
    "collections.Counter",
    "collections.defaultdict",
    "_codecs.encode",
    "numpy.dtype",
    "numpy.ndarray",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
    "torch.serialization._get_layout",
    "torch.storage.TypedStorage",
    "torch.storage.UntypedStorage",
    "torch.jit._pickle.restore_type_tag",
}
_PLAIN_MODULES = ("torch._utils", "torch._tensor", "torch", "__torch__", "builtins")
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "UNICODE", "BINUNICODE8")


def names_in_weights(source: Path, name: str) -> list[str]:
    """The classes and functions in weights beyond tensors; empty for plain weights."""
    if source.is_dir():
        return names_in_file(source / name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "weights"
        for item in read_entries(source, DEFAULT_LIMITS):
            if item.kind == "file" and (item.name == name or item.name.endswith(f"/{name}")):
                with copy.open("wb") as file:
                    file.writelines(read_chunks(item))
                return names_in_file(copy)
    return []


def names_in_file(path: Path) -> list[str]:
    """As `names_in_weights`, for a file; older formats and TorchScript yield nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.namelist()
            if any(entry.endswith("constants.pkl") for entry in entries):
                return []
            pickles = [archive.read(entry) for entry in entries if entry.endswith("/data.pkl")]
    except (OSError, zipfile.BadZipFile):
        return []
    return sorted({name for content in pickles for name in globals_of(content) if not is_plain(name)})


def globals_of(content: bytes) -> set[str]:
    """The names that a pickle would look up."""
    found: set[str] = set()
    texts: list[str] = []
    try:
        for code, argument, _ in pickletools.genops(content):
            if code.name == "GLOBAL":
                found.add(str(argument).replace(" ", "."))
            elif code.name == "STACK_GLOBAL" and len(texts) > 1:
                found.add(f"{texts[-2]}.{texts[-1]}")
            elif code.name in _TEXTS:
                texts.append(str(argument))
    except ValueError:
        pass  # the names before the error still count
    return found


def is_plain(name: str) -> bool:
    """Whether a name belongs to tensors and their containers."""
    module = name.rpartition(".")[0]
    return name in _PLAIN or module in _PLAIN_MODULES
