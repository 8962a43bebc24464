from flambeau.metrics.units import Units as Units
