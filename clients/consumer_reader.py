"""A former place of `Delivery`, which keeps working. New code imports from `clients`."""

from __future__ import annotations

from clients.consumer.batch_reader import Delivery

__all__ = ["Delivery"]
