from flambeau.torchserve.metrics.metric import Dimension as Dimension
