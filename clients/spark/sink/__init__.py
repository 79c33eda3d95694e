"""Tables that follow a server: the rules, Parquet folders, Delta tables, and `apply_changes`."""
