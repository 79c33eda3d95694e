"""An archive: its folder, lock, manifests and segments, and the history that it holds."""
