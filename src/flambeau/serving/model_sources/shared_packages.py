"""Packages that models share with the server, and the requirements of a model that contradict them. Pure decisions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# A model's own copy of these would take gigabytes and might not fit the installed drivers.
SHARED = re.compile(r"torch|torchvision|torchaudio|triton|nvidia[-_.].*|flambeau", re.IGNORECASE)
NESTED = re.compile(r"(\s*(?:-r|-c|--requirement|--constraint)[\s=]+)(\S+)")
COMMENT = re.compile(r"(^|\s)#.*$")


@dataclass(frozen=True, slots=True)
class PinConflict:
    """A line of requirements that the shared version of a package does not meet."""

    number: int  # of the line, from 1
    wanted: str
    name: str
    shared: str  # the version that the server has

    def __str__(self) -> str:
        return f"line {self.number} wants {self.wanted}, and models share {self.name} {self.shared} with the server"


def shared_versions(installed: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The versions of the shared packages among the installed ones, by normalized name."""
    from packaging.utils import canonicalize_name

    return {canonicalize_name(name): version for name, version in installed if SHARED.fullmatch(name)}


def find_conflicts(requirements: str, shared: Mapping[str, str]) -> list[PinConflict]:
    """The lines that name a shared package in another version than the server's."""
    found = (conflict_of(number, line, shared) for number, line in enumerate(requirements.splitlines(), 1))
    return [conflict for conflict in found if conflict is not None]


def conflict_of(number: int, line: str, shared: Mapping[str, str]) -> PinConflict | None:
    from packaging.requirements import InvalidRequirement, Requirement  # loaded only for models with requirements
    from packaging.utils import canonicalize_name

    try:
        wanted = Requirement(COMMENT.sub("", line).strip())
    except InvalidRequirement:  # an option, a path or an empty line
        return None
    version = shared.get(canonicalize_name(wanted.name))
    is_used = wanted.marker is None or wanted.marker.evaluate()
    if version is None or not is_used or wanted.specifier.contains(version, prereleases=True):
        return None
    return PinConflict(number, str(wanted), wanted.name, version)


def without_lines(requirements: str, numbers: Iterable[int], folder: Path) -> str:
    """The requirements without these lines, for a file elsewhere: the lists that it includes get their whole path."""
    left_out = {*numbers}
    lines = [line for number, line in enumerate(requirements.splitlines(), 1) if number not in left_out]
    return "\n".join(NESTED.sub(lambda found: f"{found[1]}{folder / found[2]}", line) for line in lines) + "\n"
