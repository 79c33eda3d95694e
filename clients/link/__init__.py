"""Connections to one node: handshake, requests and replies, TLS, and the reported topology."""
