"""What handlers import from `ts.handler_utils.utils`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from flambeau.torchserve.intermediate_responses import send_intermediate
from flambeau.torchserve.otf_protocol import create_predict_response as create_predict_response
from flambeau.worker.context import Context


def import_class(class_name: str, module_prefix: str | None = None) -> Any:
    """The class that `package.module.Class`, or a name below a prefix, means."""
    module_name, _, name = class_name.rpartition(".")
    if not name:
        raise ImportError("class name is not defined")
    module_name = ".".join(part for part in (module_prefix, module_name) if part)
    if not module_name:
        raise ImportError(f"module name is not defined: write package.module.{name}, or give a module_prefix")
    found = getattr(importlib.import_module(module_name), name, None)
    if found is None:
        raise ImportError(f"class:{name} not found in module:{module_name}.")
    return found


def send_intermediate_predict_response(
    ret: Sequence[Any], req_id_map: Mapping[int, str], message: str, code: int, context: Context
) -> None:
    """Send one chunk to each request that `req_id_map` names, before the handler returns."""
    send_intermediate(ret, req_id_map, message, code, context)
