from flambeau.handlers.profiler import timed

__all__ = ["timed"]
