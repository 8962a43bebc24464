"""JPEG in, best class out: decoding and resizing in `preprocess`, a small convolutional network after it."""

import io

import numpy
import torch
from PIL import Image

from flambeau.handlers.base import BaseHandler


class PhotoHandler(BaseHandler):
    def preprocess(self, data):
        photos = []
        for row in data:
            photo = Image.open(io.BytesIO(row["body"])).convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)
            pixels = torch.from_numpy(numpy.array(photo))
            photos.append(pixels.permute(2, 0, 1).float() / 255)
        return torch.stack(photos)

    def postprocess(self, data):
        scores, labels = data.softmax(1).max(1)
        pairs = zip(labels.tolist(), scores.tolist(), strict=True)
        return [{"label": label, "score": score} for label, score in pairs]
