"""Metadata stores of clusters over the network: the embedded one. Shells around `dcp.cluster`."""
