"""TorchServe's import name for the codec of its worker protocol."""

from flambeau.torchserve.otf.protocol import create_load_model_response as create_load_model_response
from flambeau.torchserve.otf.protocol import create_predict_response as create_predict_response
from flambeau.torchserve.otf.protocol import deprecated_send_intermediate_predict_response
from flambeau.torchserve.otf.protocol import encode_response_headers as encode_response_headers
from flambeau.torchserve.otf.protocol import retrieve_msg as retrieve_msg

send_intermediate_predict_response = deprecated_send_intermediate_predict_response
