/* What the files of the loop for changes share: set_run.c has the loop, set_old.c finds what a
   request replaces, and set_content.c says what becomes of that. */

#ifndef DCPD_SET_PARTS_H
#define DCPD_SET_PARTS_H

#include "attributes.h"
#include "key_tree.h"
#include "set_request.h"

enum { /* of a partition */
    STATE, HOLDS, NEWEST, APPEND_ENTRY, FROZEN, MERGED_SEQNO, RECENT, OLDER,
    RECENT_BYTES, OLDER_BYTES, HIGH_SEQNO, MAX_CAS, LEADER_EPOCH, VB_UUID, LAST_GROUP, ITEM_COUNT,
    ATTRIBUTES
};

enum { HELD_BYTES, TAKEN };

typedef struct {
    PyObject_HEAD
    PyObject *partitions; /* a list */
    PyObject *meta_below, *tree, *item_cache, *damaged;
    PyTypeObject *partition, *layer; /* their classes */
    Attribute of[ATTRIBUTES];
    Attribute layer_newest;
    Attribute of_cache[2]; /* HELD_BYTES and TAKEN of the item cache */
    size_t window; /* how many requests are planned at once */
} SetRun;

/* A request, and what it replaces. The references are its own. */
typedef struct {
    Request request;
    PyObject *part, *newest, *key;
    uint64_t high_seqno;
    Old old;
    int outcome;  /* of `old_version` */
    int cache;    /* RECENT or OLDER: the item cache has what is replaced; -1: it has not */
    int status;   /* KEY_ENOENT or KEY_EEXISTS, if the request is refused */
    uint8_t full_key[2 + KEY_BYTES_MAX];
} Planned;

/* The functions below return 1, 0 with an exception, or -1 for what Python should do. Those that
   look for an old version may also return these. */
enum { NOT_IN_MEMORY = 2, CACHED /* Versions.meta_below knows it */, REFUSED };

enum { KEY_ENOENT = 1, KEY_EEXISTS };

/* Looks for what a request replaces, in memory. Returns NOT_IN_MEMORY for what is not there. */
int old_version(SetRun *self, Old *old, PyObject *part, PyObject *newest, PyObject *key);

/* Looks up in the store what is not in memory. Returns 0 with an exception. */
int search_store(const SetRun *self, Planned *planned, size_t count);

/* Of an entry of a layer; an empty one says that the key does not exist, whatever lower layers
   have. */
int old_of_entry(Old *old, PyObject *entry);

/* Asks Versions.meta_below. */
int old_of_python(const SetRun *self, Old *old, PyObject *part, PyObject *key);

/* Of the item cache; sets `cache`. Returns CACHED if it has no document. */
int old_of_cached(const SetRun *self, Planned *planned);

/* Removes what is replaced from the item cache, as its `take` does. Returns CACHED if its sizes
   are wrong. */
int uncache(const SetRun *self, const Planned *planned);

/* Says whether a request is carried out: 1, or REFUSED; then `status` is set. */
int judge(Planned *planned, uint32_t now_s);

/* Says what a request stores. The result is valid until something is changed. */
int content_of(SetRun *self, const Planned *planned, Content *content);

/* Finds the entry of a key in the layers, a borrowed reference. NULL: they have none, or there is
   an exception. */
PyObject *layer_entry(SetRun *self, const Planned *planned);

#endif
