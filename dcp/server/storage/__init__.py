"""A node's disk: the folder, the log, the store process, and when merges and compactions run."""
