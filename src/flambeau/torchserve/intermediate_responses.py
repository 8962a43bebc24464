"""What a handler sends before it returns, in TorchServe's way of saying it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flambeau.errors import HandlerError
from flambeau.torchserve.otf_protocol import create_predict_response, is_first_rank
from flambeau.worker.context import Context


def send_intermediate(
    ret: Sequence[Any], req_id_map: Mapping[int, str], message: str, code: int, context: Context | None
) -> None:
    """Send one chunk to each request named; a socket set by hand gets TorchServe's bytes. Later ranks send nothing."""
    if not is_first_rank():
        return
    if context is None or context.cl_socket is None:
        raise HandlerError("a chunk can be sent only while a request is handled, through its context")
    outlet: Any = context.cl_socket
    if not hasattr(outlet, "sendall"):
        context.send(ret, req_id_map)
    else:
        outlet.sendall(create_predict_response(ret, req_id_map, message, code, context, True))
