from flambeau.handlers.timing import timed

__all__ = ["timed"]
