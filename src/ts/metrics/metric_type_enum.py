from flambeau.torchserve.metrics.units import MetricTypes as MetricTypes
