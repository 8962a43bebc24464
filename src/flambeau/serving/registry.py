"""Registry: name → versions → Model; the first version of a name is its default."""

from __future__ import annotations

from collections.abc import Iterator

from flambeau.errors import BadRequest, DefaultVersionInUse, ModelExists, ModelNotFound, VersionNotFound
from flambeau.serving.model import Model


class Registry:
    """The models of a server, by name and version."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[str, Model]] = {}
        self._default: dict[str, str] = {}

    def __iter__(self) -> Iterator[Model]:
        return (model for versions in [*self._versions.values()] for model in [*versions.values()])

    def find(self, name: str, version: str | None = None) -> Model:
        """The model of that name, in its default version unless one is given."""
        versions = self._versions.get(name)
        if versions is None:
            raise ModelNotFound(f"Model not found: {name}")
        model = versions.get(version or self._default[name])
        if model is None:
            raise VersionNotFound(f"Model version: {version} does not exist for model: {name}")
        return model

    def versions(self, name: str) -> list[Model]:
        self.find(name)
        return [*self._versions[name].values()]

    def defaults(self) -> list[Model]:
        """The default version of each model, by name."""
        return [self.find(name) for name in sorted(self._versions)]

    def is_default(self, model: Model) -> bool:
        """Whether requests that name no version go to this model."""
        return self._default.get(model.name) == model.version

    def check_free(self, name: str, version: str) -> None:
        """Raise if that name and version are taken."""
        if version in self._versions.get(name, {}):
            raise ModelExists(name, version)

    def add(self, model: Model) -> None:
        """Add a model; the first version of a name becomes its default."""
        self.check_free(model.name, model.version)
        self._versions.setdefault(model.name, {})[model.version] = model
        self._default.setdefault(model.name, model.version)

    def remove(self, name: str, version: str | None = None, *, even_default: bool = False) -> Model:
        """Remove a model; the default version only if it is the last one, or with `even_default`."""
        model = self.find(name, version)
        versions = self._versions[name]
        if self.is_default(model) and len(versions) > 1:
            if not even_default:
                raise DefaultVersionInUse(name)
            self._default[name] = next(other for other in versions if other != model.version)
        del versions[model.version]
        if not versions:
            del self._versions[name], self._default[name]
        return model

    def discard(self, model: Model) -> None:
        """Remove this model if it is still there: another may have its name and version by now."""
        if self._versions.get(model.name, {}).get(model.version) is model:
            self.remove(model.name, model.version, even_default=True)

    def set_default(self, name: str, version: str) -> None:
        """Make this version serve requests that name none."""
        self.find(name)
        if version not in self._versions[name]:
            raise VersionNotFound(f"Model version {version} does not exist for model {name}")
        self._default[name] = version


def check_name(name: str) -> None:
    """Reject a name or version with characters that would break a log, a metric or a header."""
    if not name.isprintable():
        raise BadRequest(f"names and versions may hold no control characters, as {name[:100]!r} does")
