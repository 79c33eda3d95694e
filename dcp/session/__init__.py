"""One client connection, sans-IO: negotiation, documents, streams."""
