from flambeau.torchserve.metrics.store import MetricsStore as MetricsStore
