"""dcpctl: one tool for documents, change streams and partitions."""
