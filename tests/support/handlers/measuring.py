"""Measures in every way a handler can, prints and logs."""

import logging
import sys

from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes

logger = logging.getLogger(__name__)


class Measuring:
    def initialize(self, context):
        context.metrics.add_counter("InitializeCount", 1)
        self.kept = context.metrics.add_metric_to_cache(
            "KeptSize", "MB", dimension_names=["ModelName"], metric_type=MetricTypes.HISTOGRAM
        )
        print("printed by initialize")

    def handle(self, data, context):
        metrics = context.metrics
        metrics.add_counter("RequestCount", len(data), None)
        metrics.add_time("StageTime", 2.5, 0, "ms", [Dimension("Stage", "one")])
        self.kept.add_or_update(0.3, [context.model_name])
        print("[METRICS]PrintedTime.ms:12|#Level:Model|#type:GAUGE|#hostname:elsewhere,123,some-id")
        print("[METRICS]this is none")
        print("a word on stdout")
        print("a word on stderr", file=sys.stderr)
        logger.info("a word of logging")
        return ["ok"] * len(data)
