"""How a process becomes a member of a cluster."""
