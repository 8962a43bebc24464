from flambeau.torchserve.metrics.store import Metric as Metric
