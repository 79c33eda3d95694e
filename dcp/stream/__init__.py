"""Streams: what a DCP producer connection sends, and when. Sans-IO."""
