from flambeau.metrics.store import MetricEncoder as MetricEncoder
