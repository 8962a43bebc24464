"""What handlers import from `ts.handler_utils.utils`."""

from flambeau.torchserve.handlers.functions import import_class as import_class
from flambeau.torchserve.worker_protocol.protocol import create_predict_response as create_predict_response
from flambeau.torchserve.worker_protocol.protocol import (
    send_intermediate_predict_response as send_intermediate_predict_response,
)
