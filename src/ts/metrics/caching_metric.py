from flambeau.torchserve.metrics.metric import CachingMetric as CachingMetric
