"""The entry point of a worker process.

python -m flambeau.worker --fd N                (a socket inherited from the server)
python -m flambeau.worker --connect HOST:PORT   (TCP; the token is in FLAMBEAU_WORKER_TOKEN)
"""

from __future__ import annotations

import sys

from flambeau.worker.worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
