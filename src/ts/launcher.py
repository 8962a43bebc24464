"""TorchServe's name for starting and stopping a server from a script."""

from flambeau.torchserve.launcher import register_model as register_model
from flambeau.torchserve.launcher import register_model_with_params as register_model_with_params
from flambeau.torchserve.launcher import start as start
from flambeau.torchserve.launcher import stop as stop
