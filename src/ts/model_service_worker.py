"""TorchServe's import name for a worker process: `python -m ts.model_service_worker`."""

import sys

from flambeau.torchserve import import_names
from flambeau.torchserve.worker_protocol import worker
from flambeau.torchserve.worker_protocol.protocol import create_load_model_response as create_load_model_response
from flambeau.torchserve.worker_protocol.protocol import retrieve_msg as retrieve_msg
from flambeau.torchserve.worker_protocol.service import ModelLoaderFactory as ModelLoaderFactory
from flambeau.torchserve.worker_protocol.worker import DEBUG as DEBUG
from flambeau.torchserve.worker_protocol.worker import LOCAL_RANK as LOCAL_RANK
from flambeau.torchserve.worker_protocol.worker import SOCKET_ACCEPT_TIMEOUT as SOCKET_ACCEPT_TIMEOUT
from flambeau.torchserve.worker_protocol.worker import TorchModelServiceWorker as TorchModelServiceWorker
from flambeau.torchserve.worker_protocol.worker import main as main

import_names.forward(__name__, worker)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
