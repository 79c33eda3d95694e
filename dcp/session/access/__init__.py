"""Who logs in, and what they may do. Sans-IO."""
