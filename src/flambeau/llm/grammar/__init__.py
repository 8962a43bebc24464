"""Text that has a given form: grammars over the tokens of a model, made by llguidance."""
