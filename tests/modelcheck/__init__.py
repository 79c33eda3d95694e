"""A breadth-first model checker over the rules of replication (docs/replication.md)."""
