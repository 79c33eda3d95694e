"""Settings: the table of them, how values are read, and the sources they come from."""
