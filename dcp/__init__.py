"""The change-stream server: wire format, streams, sessions and the process around them."""
