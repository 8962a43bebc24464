"""What handlers import from `ts.utils.timeit_decorator`."""

from flambeau.torchserve.handlers.functions import timeit as timeit
