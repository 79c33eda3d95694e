"""Documents and their collections: get, set, del, keys, import, collection."""
