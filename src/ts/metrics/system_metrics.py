"""The state of the host, one function per metric; `collect_all` prints what they added to `system_metrics`."""

from flambeau.torchserve.metrics.collector import HOST_COLLECTOR

dimension = HOST_COLLECTOR.dimensions
system_metrics = HOST_COLLECTOR.metrics
cpu_utilization = HOST_COLLECTOR.cpu_utilization
memory_used = HOST_COLLECTOR.memory_used
memory_available = HOST_COLLECTOR.memory_available
memory_utilization = HOST_COLLECTOR.memory_utilization
disk_used = HOST_COLLECTOR.disk_used
disk_utilization = HOST_COLLECTOR.disk_utilization
disk_available = HOST_COLLECTOR.disk_available
gpu_utilization = HOST_COLLECTOR.gpu_utilization
collect_all = HOST_COLLECTOR.collect_all

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
