from flambeau.metrics.store import MetricsStore as MetricsStore
