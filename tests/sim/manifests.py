"""Collections that come and go, under names that come back."""

from __future__ import annotations

from typing import Final

from sim.world import World
from vbucket.model.manifest import DEFAULT_NAME, Manifest

NAMES: Final = ("a", "b")
DROPPED_SHARE: Final = 0.4


def changed(world: World, manifest: Manifest) -> Manifest:
    """Create a collection, or drop one. A name that comes back is another collection."""
    there = ids(manifest)
    missing = [name for name in NAMES if name not in there]
    if there and (not missing or world.chance(DROPPED_SHARE)):
        names = list(there)
        return manifest.drop_collection(DEFAULT_NAME, names[world.below(len(names))])
    return manifest.create_collection(DEFAULT_NAME, missing[world.below(len(missing))])


def ids(manifest: Manifest) -> dict[str, int]:
    """Return name -> id of the collections beside the default one."""
    return {each.name: number for number, each in manifest.collections.items() if number}
