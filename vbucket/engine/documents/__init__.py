"""What the engine does for single documents: expiry, cache, locks, changes of values. Sans-IO."""
