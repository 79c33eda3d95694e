"""A former place of `Group`, which keeps working. New code imports from `clients`."""

from __future__ import annotations

from clients.consumer.group import Group

__all__ = ["Group"]
