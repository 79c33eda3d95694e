"""Plain values: identifiers, entries, the collections manifest, the partition map. Pure."""
