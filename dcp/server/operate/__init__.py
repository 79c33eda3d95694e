"""What operators do to a node: branches, failovers, purges, collections, dumps, checks."""
