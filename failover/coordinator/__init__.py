"""The cluster's metadata: the store that keeps it, its records, and the coordinator. Pure."""
