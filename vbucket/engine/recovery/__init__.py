"""The start of a node: what log and store hold becomes an engine again. Sans-IO."""
