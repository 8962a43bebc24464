"""`python -m ts.llm_launcher`: serve a language model."""

import sys

from flambeau.torchserve.llm_launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
