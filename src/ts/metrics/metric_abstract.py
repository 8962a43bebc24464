from flambeau.torchserve.metrics.metric import MetricAbstract as MetricAbstract
