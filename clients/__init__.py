"""Python clients: key-value, change-stream consumer, and the dcpctl command."""
