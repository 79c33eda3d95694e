"""The embedded metadata store: its file, its server, and its clients."""
