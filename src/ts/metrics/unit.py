from flambeau.torchserve.metrics.units import Units as Units
