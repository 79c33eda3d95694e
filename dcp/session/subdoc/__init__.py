"""Sub-documents: commands that read or change parts of a JSON document, and its XATTRs."""
