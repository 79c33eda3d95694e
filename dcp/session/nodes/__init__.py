"""Commands that only nodes of a cluster send to each other. Pure."""
