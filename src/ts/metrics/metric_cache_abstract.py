from flambeau.metrics.cache import MetricCacheAbstract as MetricCacheAbstract
