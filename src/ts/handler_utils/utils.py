"""What handlers import from `ts.handler_utils.utils`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flambeau.worker.context import Context


def send_intermediate_predict_response(
    ret: Sequence[Any], req_id_map: Mapping[int, str], message: str, code: int, context: Context
) -> None:
    """Send one chunk to each request of the batch, before the handler returns."""
    context.send(ret)
