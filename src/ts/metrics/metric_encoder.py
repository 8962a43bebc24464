from flambeau.torchserve.metrics.store import MetricEncoder as MetricEncoder
