"""`python -m flambeau`: the `flambeau` command."""

from flambeau.cli.main import main

main()
