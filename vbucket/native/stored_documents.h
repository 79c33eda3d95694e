/* Documents that only the store has: found in the pages of `by_key` and `by_seqno`. */

#ifndef DCPD_STORED_DOCUMENTS_H
#define DCPD_STORED_DOCUMENTS_H

#include "key_tree.h"

/* A key to look for. The frame lies in the file. */
typedef struct {
    const uint8_t *full_key; /* partition and key, as in `by_key` */
    size_t key_bytes;        /* of full_key */
    int outcome;             /* FOUND, ABSENT: there is surely no document, or UNKNOWN */
    const uint8_t *frame;
    size_t frame_bytes;
} Wanted;

/* Whether a key of `by_key` is surely absent after a search: by the records beside its place, or
   else by the checksums of the pages on the way, as they are now. */
int record_is_absent(const KeyTree *by_key, const Search *search);

/* Looks for up to SEARCHES_MAX documents together. What is not as it should be, and what other
   pages would have to be read for, is UNKNOWN: Python tells. */
void stored_documents_find(const KeyTree *by_key, const KeyTree *by_seqno, Wanted *wanted,
                           size_t count);

#endif
