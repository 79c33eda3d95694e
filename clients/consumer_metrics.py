"""A former place of `ConsumerMetrics` and `export_prometheus`.

It keeps working. New code imports from `clients`.
"""

from __future__ import annotations

from clients.consumer.counters import ConsumerMetrics, export_prometheus

__all__ = ["ConsumerMetrics", "export_prometheus"]
