"""Creates networks, request bodies and archives for the servers.

As a script, `assets.py FOLDER [TASK …]` makes the bodies and the networks of the named tasks; it needs torch for
`mlp` and `image` and Pillow for `image`, which the driver itself does not.
"""

import json
import random
import sys
import zipfile
from pathlib import Path
from typing import Any

from workloads import CHUNKS, SLOW_CHUNKS, SLOW_PAUSE_MS, Model

HANDLERS = Path(__file__).parent / "handlers"
MODEL_NAME = "bench"


def make_bodies(folder: Path) -> None:
    """Reproducible request bodies that need only the standard library."""
    dice = random.Random(0)
    json_bodies = {
        "echo.json": {"id": 123456, "user": "ada", "tags": ["red", "green"], "score": 0.875, "text": "a short request"},
        "vector.json": {"x": [round(dice.random(), 4) for _ in range(784)]},
        "stream.json": {"chunks": CHUNKS},
        "slow-stream.json": {"chunks": SLOW_CHUNKS, "pause_ms": SLOW_PAUSE_MS},
    }
    for name, value in json_bodies.items():
        (folder / name).write_text(json.dumps(value, separators=(",", ":")))
    (folder / "blob-1mb.bin").write_bytes(dice.randbytes(2**20))
    (folder / "blob-10mb.bin").write_bytes(dice.randbytes(10 * 2**20))


def make_picture(folder: Path) -> None:
    """A 224×224 JPEG, half shapes and half grain, so that decoding it costs what a photograph costs."""
    from PIL import Image

    dice = random.Random(1)
    shapes = Image.frombytes("RGB", (14, 14), dice.randbytes(14 * 14 * 3)).resize((224, 224))
    grain = Image.frombytes("RGB", (224, 224), dice.randbytes(224 * 224 * 3))
    Image.blend(shapes, grain, 0.25).save(folder / "picture.jpg", quality=95)


def make_mlp(folder: Path) -> None:
    """A 784-512-512-10 perceptron with random weights."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    _save_traced(network, torch.zeros(1, 784), folder / "mlp.pt")


def make_resnet(folder: Path) -> None:
    """A network of resnet18's shape with random weights; torchvision is not needed."""
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, width_in: int, width: int, stride: int):
            super().__init__()
            self.path = nn.Sequential(
                nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, 1, 1, bias=False),
                nn.BatchNorm2d(width),
            )
            self.shortcut: nn.Module = nn.Identity()
            if stride != 1 or width_in != width:
                self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

        def forward(self, x_BCHW: Any) -> Any:  # noqa: N803
            return torch.relu(self.path(x_BCHW) + self.shortcut(x_BCHW))

    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    width_in = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(width_in, width, stride), Residual(width, width, 1)]
        width_in = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    _save_traced(nn.Sequential(*layers), torch.zeros(1, 3, 224, 224), folder / "image.pt")


def _save_traced(network: Any, example: Any, file: Path) -> None:
    import torch

    with torch.no_grad():
        torch.jit.trace(network.eval(), example).save(str(file))  # type: ignore[no-untyped-call]


def model_files(model: Model, assets: Path) -> dict[str, Path]:
    """The files a model is made of, by their names in the archive."""
    files = {f"{model.handler}.py": HANDLERS / f"{model.handler}.py"}
    if model.handler == "bench_handler":
        files["work.py"] = HANDLERS / "work.py"
    if model.task in ("mlp", "image"):
        files["model.pt"] = assets / f"{model.task}.pt"
    return files


def make_archive(model: Model, assets: Path, folder: Path) -> Path:
    """A .mar of the model, as torch-model-archiver would write it (stored rather than deflated)."""
    manifest = {
        "createdOn": "01/01/2026 00:00:00",
        "runtime": "python",
        "model": {
            "modelName": MODEL_NAME,
            "modelVersion": "1.0",
            "handler": f"{model.handler}.py",
            "configFile": "model-config.yaml",
        },
        "archiverVersion": "0.12.0",
    }
    settings = (
        f"minWorkers: {model.workers}\n"
        f"maxWorkers: {model.workers}\n"
        f"batchSize: {model.batch_size}\n"
        f"maxBatchDelay: {model.max_batch_delay_ms}\n"
        "responseTimeout: 120\n"
        "handler:\n"
        f"  task: {model.task}\n"
    )
    archive = folder / f"{MODEL_NAME}.mar"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest, indent=2))
        zipped.writestr("model-config.yaml", settings)
        for name, source in model_files(model, assets).items():
            zipped.write(source, name)
    return archive


def main() -> None:
    folder, tasks = Path(sys.argv[1]), sys.argv[2:]
    make_bodies(folder)
    if "mlp" in tasks:
        make_mlp(folder)
    if "image" in tasks:
        make_picture(folder)
        make_resnet(folder)


if __name__ == "__main__":
    main()
