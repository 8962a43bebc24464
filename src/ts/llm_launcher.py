"""`python -m ts.llm_launcher`: serve a language model."""

import sys

from flambeau.cli.llm_launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
