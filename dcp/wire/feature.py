"""HELLO features, and which of them this server grants."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Feature(IntEnum):
    """Feature codes of HELLO that this project has names for."""

    TCP_NODELAY = 0x03
    MUTATION_SEQNO = 0x04
    XATTR = 0x06
    XERROR = 0x07
    SELECT_BUCKET = 0x08
    SNAPPY = 0x0A
    JSON = 0x0B
    DUPLEX = 0x0C
    CLUSTERMAP_CHANGE_NOTIFICATION = 0x0D
    UNORDERED_EXECUTION = 0x0E
    TRACING = 0x0F
    ALT_REQUEST = 0x10
    SYNC_REPLICATION = 0x11
    COLLECTIONS = 0x12
    PRESERVE_TTL = 0x14
    VATTR = 0x15
    SUBDOC_CREATE_AS_DELETED = 0x17
    SUBDOC_DOCUMENT_MACRO_SUPPORT = 0x18
    SUBDOC_REPLACE_BODY_WITH_XATTR = 0x19
    GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION = 0x1D
    DEDUPE_NOT_MY_VBUCKET = 0x1E
    CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF = 0x1F
    SUBDOC_MULTIPLE_XATTR_KEYS = 0x20
    X_PUT_FRAMES = 0xDC01
    """Our extension: the command X_PUT_FRAMES."""
    X_FIT_META = 0xDC02
    """Our extension: the option FIT_META of commands that carry a revision and a CAS."""


GRANTED: Final = frozenset(
    {
        Feature.TCP_NODELAY,
        Feature.MUTATION_SEQNO,
        Feature.XATTR,
        Feature.XERROR,
        Feature.SELECT_BUCKET,
        Feature.SNAPPY,
        Feature.JSON,
        Feature.ALT_REQUEST,
        Feature.SYNC_REPLICATION,
        Feature.COLLECTIONS,
        Feature.PRESERVE_TTL,
        Feature.VATTR,
        Feature.SUBDOC_CREATE_AS_DELETED,
        Feature.SUBDOC_DOCUMENT_MACRO_SUPPORT,
        Feature.SUBDOC_REPLACE_BODY_WITH_XATTR,
        Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION,
        Feature.DEDUPE_NOT_MY_VBUCKET,
        Feature.SUBDOC_MULTIPLE_XATTR_KEYS,
        Feature.X_PUT_FRAMES,
        Feature.X_FIT_META,
    }
)
"""What HELLO grants when asked. It never grants a feature that the client did not ask for."""

MAP_PUSHES: Final = frozenset(
    {Feature.CLUSTERMAP_CHANGE_NOTIFICATION, Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF}
)
GRANTED_IN_CLUSTERS: Final = GRANTED | MAP_PUSHES | {Feature.DUPLEX}
"""What a node of a cluster grants. A node alone pushes no maps, because its map never changes."""
