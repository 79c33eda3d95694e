"""Checks of a data folder off line: its log, its partitions, its store. Pure."""
