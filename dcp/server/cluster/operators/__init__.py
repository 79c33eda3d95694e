"""What operators ask of a cluster, and what they are shown."""
