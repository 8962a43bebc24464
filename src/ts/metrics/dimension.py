from flambeau.torchserve.metrics.units import Dimension as Dimension
