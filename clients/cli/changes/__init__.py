"""The change stream: watch it, steer consumers' streams, explain a rollback."""
