"""The order of what a node does: groups, merges, floors. Sans-IO."""
