from flambeau.metrics.units import Dimension as Dimension
