"""A cluster of nodes: create it, change it, see its state; a cluster on this machine to try."""
