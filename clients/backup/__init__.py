"""Backup: archives of a server's change streams, and what is made of them.

    legs, point       what an archive holds of a partition, and places in its history      pure
    intake            one DCP connection that gathers stored frames                        pure
    chunk, segment,   frames -> chunks -> segments, and the manifests                      pure
    manifest
    place, lock       an fsspec folder, and who may write to it
    archive           what such a folder holds
    run               a backup, over links to all nodes; segment_writer its thread's part
    strip             the frames of a section, as columns                                  pure
    reading           a partition as of a point, newest version per key
    restore, fold,    what is done with an archive
    verify, export

The format is docs/backup.md.
"""
