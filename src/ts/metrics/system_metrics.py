"""The host's state, a function per figure; `collect_all` prints what they have added to `system_metrics`."""

from flambeau.torchserve.metrics.collector import Collector
from flambeau.torchserve.metrics.units import Dimension

dimension = [Dimension("Level", "Host")]
_collector = Collector(dimension)

system_metrics = _collector.metrics
cpu_utilization = _collector.cpu_utilization
memory_used = _collector.memory_used
memory_available = _collector.memory_available
memory_utilization = _collector.memory_utilization
disk_used = _collector.disk_used
disk_utilization = _collector.disk_utilization
disk_available = _collector.disk_available
gpu_utilization = _collector.gpu_utilization
collect_all = _collector.collect_all

__all__ = [
    "collect_all",
    "cpu_utilization",
    "dimension",
    "disk_available",
    "disk_used",
    "disk_utilization",
    "gpu_utilization",
    "memory_available",
    "memory_used",
    "memory_utilization",
    "system_metrics",
]
