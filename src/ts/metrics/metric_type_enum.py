from flambeau.metrics.definitions import MetricTypes as MetricTypes
