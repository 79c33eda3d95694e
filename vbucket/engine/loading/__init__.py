"""Many documents at once: packets of frames, and restores straight into the store. Sans-IO."""
