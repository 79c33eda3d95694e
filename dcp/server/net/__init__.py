"""The key-value ports: connections, TLS, and bounds on what clients may hold."""
