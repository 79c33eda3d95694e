"""The store process, its queue and its messages: the only writer of the store."""
