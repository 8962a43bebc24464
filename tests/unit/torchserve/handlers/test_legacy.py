from __future__ import annotations

import io

import pytest
import torch

from flambeau.errors import BadRequest
from flambeau.torchserve.handlers.legacy import DenseNetHandler
from flambeau.worker.context import Context
from support.packing import NETWORKS


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.fixture
def handler(tmp_path):
    (tmp_path / "tiny_classifier.py").write_text((NETWORKS / "tiny_classifier.py").read_text())
    handler = DenseNetHandler()
    handler.initialize(Context("m", str(tmp_path), {"model": {"modelFile": "tiny_classifier.py"}}, 1, None, "1"))
    return handler


def test_each_tensor_of_a_batch_is_answered(handler):
    images = torch.rand(3, 3, 16, 16)
    answers = handler.handle([{"body": saved(image)} for image in images], None)
    torch.testing.assert_close(torch.cat(answers), handler.model(images).detach())
    assert answers[0].untyped_storage().nbytes() == answers[0].nbytes


@pytest.mark.parametrize("body", [b"x", saved([1]), saved(torch.nn.Linear(1, 1))])
def test_bodies_without_a_tensor_are_rejected(handler, body):
    with pytest.raises(BadRequest):
        handler.handle([{"body": body}], None)
