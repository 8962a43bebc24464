from flambeau.metrics.caching import CachingMetric as CachingMetric
