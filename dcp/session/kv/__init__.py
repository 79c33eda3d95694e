"""Commands on documents: one by one, in runs, scans, counters, WITH_META. Sans-IO."""
