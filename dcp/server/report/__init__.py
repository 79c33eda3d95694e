"""What is read from all parts: metrics for Prometheus, statistics for the STAT command."""
