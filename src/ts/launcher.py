"""TorchServe's name for starting and stopping a server from a script."""

from flambeau.cli.launcher import register_model as register_model
from flambeau.cli.launcher import register_model_with_params as register_model_with_params
from flambeau.cli.launcher import start as start
from flambeau.cli.launcher import stop as stop
