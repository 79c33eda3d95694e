"""Collections that come and go, under names that come back."""

from __future__ import annotations

from typing import Final

from sim.world import World
from vbucket.model.manifest import DEFAULT_NAME, Manifest

NAMES: Final = ("a", "b")
DROPPED_SHARE: Final = 0.4


def changed(world: World, manifest: Manifest, max_ttl_s: int) -> Manifest:
    """Create a collection, with a maxTTL unless that is 0, or drop one. A name that comes back is
    another collection.
    """
    there = ids(manifest)
    missing = [name for name in NAMES if name not in there]
    if there and (not missing or world.chance(DROPPED_SHARE)):
        names = list(there)
        return manifest.drop_collection(DEFAULT_NAME, names[world.below(len(names))])
    name = missing[world.below(len(missing))]
    return manifest.create_collection(DEFAULT_NAME, name, max_ttl_s)


def max_ttls(manifest: Manifest) -> dict[int, int]:
    """Return id -> maxTTL in seconds of the collections that have one."""
    limits = ((number, each.max_ttl_s) for number, each in manifest.collections.items())
    return {number: seconds for number, seconds in limits if seconds}


def ids(manifest: Manifest) -> dict[str, int]:
    """Return name -> id of the collections beside the default one."""
    return {each.name: number for number, each in manifest.collections.items() if number}
