"""Damage of a member is mended with what the other copies have."""
