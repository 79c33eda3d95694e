"""Nodes as they are now: status, top, bench, settings, log."""
