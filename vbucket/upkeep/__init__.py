"""What rewrites the store: the merge of log segments, compaction, and what history is kept."""
