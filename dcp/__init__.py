"""The change-stream server: wire format, streams, sessions and the process around them."""

__version__ = "0.2.0"
