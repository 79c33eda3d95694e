"""Quarantine files of simulated nodes: written to the machine's disk, read back by checkers."""

from __future__ import annotations

from support.forgetful_disk import ForgetfulDisk
from vbucket.model.receipt import CutOff, DiscardDamagedError, pack_cut_off, unpack_cut_off

SUFFIX = ".cut"


def keep(disk: ForgetfulDisk, cut: CutOff) -> None:
    """Write a file and make it durable. Raises OSError; then no part of it is left."""
    name = cut.file_name
    fd = disk.create(name)
    try:
        disk.write(fd, pack_cut_off(cut), 0)
        disk.sync(fd)
        disk.sync_folder()
    except OSError:
        disk.remove(name)
        raise
    finally:
        disk.close(fd)


def kept(disk: ForgetfulDisk) -> list[CutOff]:
    """Return what the readable files of a disk hold."""
    found = []
    for name in sorted(disk.names()):
        if name.endswith(SUFFIX):
            try:
                found.append(unpack_cut_off(disk.read(name)))
            except DiscardDamagedError:
                continue  # the power went before it was synced: nothing was cut off then
    return found
