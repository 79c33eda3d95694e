"""Answers that wait for commits, and requests that take long. Sans-IO."""
