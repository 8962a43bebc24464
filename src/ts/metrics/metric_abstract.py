from flambeau.metrics.caching import MetricAbstract as MetricAbstract
