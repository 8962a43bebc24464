"""What code written for TorchServe imports from `ts.protocol.otf_message_handler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flambeau.torchserve.intermediate_responses import send_intermediate
from flambeau.torchserve.otf_protocol import create_load_model_response as create_load_model_response
from flambeau.torchserve.otf_protocol import create_predict_response as create_predict_response
from flambeau.torchserve.otf_protocol import encode_response_headers as encode_response_headers
from flambeau.torchserve.otf_protocol import retrieve_msg as retrieve_msg
from flambeau.worker.context import Context
from ts.utils.util import deprecated


@deprecated(version="1.0", replacement="ts.handler_utils.utils.send_intermediate_predict_response")
def send_intermediate_predict_response(
    ret: Sequence[Any], req_id_map: Mapping[int, str], message: str, code: int, context: Context | None = None
) -> None:
    """Send one chunk to each request that `req_id_map` names, before the handler returns."""
    send_intermediate(ret, req_id_map, message, code, context)
