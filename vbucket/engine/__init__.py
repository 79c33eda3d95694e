"""The engine: documents and partitions in memory over log and store. Sans-IO."""
