"""An example model for handwritten digits. It is trained in seconds at the first start, and cached."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

from flambeau.archive.pack import Recipe, pack
from flambeau.archive.packages import find_missing
from flambeau.errors import ConfigError

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "digits_model"


def missing() -> list[str]:
    """The modules that must be installed to serve it, and are not; the trained model needs fewer."""
    return find_missing(("torch",) if cached().is_file() else ("torch", "sklearn"), sys.path)


def archive() -> Path:
    """The path of the packed model; it is trained first if this version is not in the user's cache."""
    found = cached()
    if not found.is_file():
        logger.info("training the example model; this happens only once")
        build(found.parent)
    return found


def cached() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flambeau" / "examples"
    recipe = b"".join(path.read_bytes() for path in (Path(__file__), *sorted(SOURCES.glob("*.py"))))
    return cache / hashlib.sha256(recipe).hexdigest()[:12] / "digits.mar"


def build(folder: Path) -> None:
    """Train on the digits of scikit-learn, and pack the model into `folder`."""
    try:
        import torch
        from sklearn.datasets import load_digits
    except ImportError as error:  # installed, but broken
        raise ConfigError(f"the example model cannot be trained: {error}; give a model to serve") from None
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        weights, settings = Path(scratch, "digits.pth"), Path(scratch, "model-config.yaml")
        torch.save(train(images, labels), weights)
        example = json.dumps([int(value) for value in digits.data[7]], separators=(",", ":"))
        settings.write_text(f"minWorkers: 1\nmaxWorkers: 1\nbatchSize: 16\nexample: '{example}'\n")
        recipe = Recipe(
            model_name="digits",
            handler=str(SOURCES / "handler.py"),
            model_file=SOURCES / "model.py",
            serialized_file=weights,
            config_file=settings,
        )
        pack(recipe, folder, force=True)


def train(images: object, labels: object) -> dict[str, object]:
    """Train for 200 epochs of one batch each; return the state dict."""
    import torch

    from flambeau.handlers.loaders.weights import find_model_class

    torch.manual_seed(0)
    network = find_model_class(SOURCES / "model.py")()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images), labels)  # type: ignore[arg-type]
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    state: dict[str, object] = network.state_dict()
    return state
