"""Cuts of a cluster: what a member does when a leader asks, and whom a leader asks. Sans-IO."""
