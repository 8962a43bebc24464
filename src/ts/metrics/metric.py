from flambeau.metrics.store import Metric as Metric
