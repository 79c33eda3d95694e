"""Replication between nodes: masters, replicas, and the links between them. Sans-IO."""
