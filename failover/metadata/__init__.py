"""Metadata stores of clusters over the network: the embedded one, and a client of etcd."""
