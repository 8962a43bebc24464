"""The work behind each benchmark task: bodies in, answers out, the same code whichever server carries them."""

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def parse(body: Any) -> Any:
    """A JSON body, which some servers hand over already parsed."""
    return body if isinstance(body, dict | list) else json.loads(bytes(body))


class Echo:
    """Answers at once, so that what is measured is the server."""

    def run(self, bodies: list[Any]) -> list[Any]:
        items = [parse(body) for body in bodies]
        return [{"id": item["id"], "fields": len(item)} for item in items]


class Blob:
    """Answers a binary body with its length in ten digits."""

    def run(self, bodies: list[Any]) -> list[Any]:
        return [b"%010d" % len(body) for body in bodies]


class Classifier:
    """Runs a TorchScript network on a batch and answers the best class of each sample."""

    def __init__(self, model_folder: Path):
        torch.set_num_threads(1)
        self.network = torch.jit.load(str(model_folder / "model.pt")).eval()

    def sample(self, body: Any) -> torch.Tensor:
        raise NotImplementedError

    def run(self, bodies: list[Any]) -> list[Any]:
        samples = torch.stack([self.sample(body) for body in bodies])
        with torch.inference_mode():
            scores, labels = self.network(samples).softmax(1).max(1)
        # Rounded: answers are compared between servers, which may batch differently.
        return [
            {"label": label, "score": round(score, 4)}
            for label, score in zip(labels.tolist(), scores.tolist(), strict=True)
        ]


class Vector(Classifier):
    """Takes a JSON list of 784 numbers."""

    def sample(self, body: Any) -> torch.Tensor:
        return torch.tensor(parse(body)["x"], dtype=torch.float32)


class Picture(Classifier):
    """Takes a JPEG, decoded with Pillow."""

    MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

    def sample(self, body: Any) -> torch.Tensor:
        from PIL import Image

        image = Image.open(io.BytesIO(body)).convert("RGB")
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(image.height, image.width, 3).permute(2, 0, 1).float() / 255
        return (pixels - self.MEAN) / self.DEVIATION


class Stream:
    """Makes numbered chunks; a slow stream also says when each was made, on the machine's monotonic clock."""

    def chunks(self, body: Any) -> Iterator[tuple[str, bool]]:
        """Each chunk, with whether it is the last."""
        request = parse(body)
        last = request["chunks"] - 1
        pause_s = request.get("pause_ms", 0) / 1000
        for index in range(last + 1):
            if pause_s:
                time.sleep(pause_s)
                yield f"<{index}@{time.monotonic_ns()}>", index == last
            else:
                yield f"<{index:03d}>", index == last


def make_work(task: str, model_folder: Path) -> Any:
    """The work a model-config.yaml names."""
    if task == "mlp":
        return Vector(model_folder)
    if task == "image":
        return Picture(model_folder)
    return {"echo": Echo, "blob": Blob, "stream": Stream}[task]()
