"""TorchServe's import name for a worker process: `python -m ts.model_service_worker`."""

import sys

from flambeau.torchserve.worker_protocol.worker import DEBUG as DEBUG
from flambeau.torchserve.worker_protocol.worker import LOCAL_RANK as LOCAL_RANK
from flambeau.torchserve.worker_protocol.worker import SOCKET_ACCEPT_TIMEOUT as SOCKET_ACCEPT_TIMEOUT
from flambeau.torchserve.worker_protocol.worker import TorchModelServiceWorker as TorchModelServiceWorker
from flambeau.torchserve.worker_protocol.worker import main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
