from flambeau.torchserve.metrics.metric import Units as Units
