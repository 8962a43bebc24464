from flambeau.metrics.units import MetricTypes as MetricTypes
