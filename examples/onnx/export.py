"""Exports a network to ONNX, with a batch axis of any length."""

import torch


class Distance(torch.nn.Module):
    """The distance of each point from the origin."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return points.square().sum(dim=1, keepdim=True).sqrt()


torch.onnx.export(
    Distance(),
    (torch.zeros(2, 2),),
    "distance.onnx",
    input_names=["points"],
    output_names=["distances"],
    dynamic_shapes=({0: torch.export.Dim("batch")},),
    dynamo=True,
)
