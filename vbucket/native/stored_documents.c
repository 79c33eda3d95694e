/* See stored_documents.h. Who calls it: get_run.c, set_old.c. vbucket/store/store.py has the
   rules, in `meta_fields`, `check_absent` and `entry_of_key`.

   Invariants
   - a record counts if its checksum is right, a frame if its checksum, partition, key, seqno and
     CAS are;
   - a key is absent only if it would be between two sound records of one leaf, within the bounds
     that the branches give that leaf, or if all pages on the way have the bytes that were written
     last. A page that was compared may have been damaged since. */

#include "stored_documents.h"

#include "blocks.h"
#include "crc32c.h"
#include "key_record.h"

#include <string.h>

/* Whether the record that a node holds is that of its key. */
static int is_record(const Node *node)
{
    return node->key_bytes > 2 &&
           record_is_sound(node->key, node->key_bytes, node->value, node->value_bytes);
}

int record_is_absent(const KeyTree *by_key, const Search *search)
{
    Node before, behind;
    if (search->outcome != ABSENT)
        return 0;
    if (key_tree_node(by_key, search, -1, &before) &&
        key_tree_node(by_key, search, 0, &behind) && is_record(&before) && is_record(&behind) &&
        key_tree_leaf_fits(by_key, search))
        return 1;
    Search again = {.key = search->key, .key_bytes = search->key_bytes, .is_strict = 1};
    key_tree_search(by_key, &again, 1);
    return again.outcome == ABSENT && again.is_proven;
}

/* Takes what the search in `by_key` has found; begins that in `by_seqno` for a document. */
static int begin_block_search(const KeyTree *by_key, const Search *record, Wanted *wanted,
                              uint8_t *block_key, Search *block)
{
    wanted->outcome = UNKNOWN;
    if (record_is_absent(by_key, record))
        wanted->outcome = ABSENT;
    if (record->outcome != FOUND || !record_is_sound(record->key, record->key_bytes, record->value,
                                                     record->value_bytes))
        return 0;
    if (record->value[0] != MUTATION) {
        wanted->outcome = ABSENT;
        return 0;
    }
    memcpy(block_key, wanted->full_key, 2);
    memcpy(block_key + 2, record->value + RECORD_SEQNO_AT, 8);
    *block = (Search){.key = block_key, .key_bytes = BLOCK_KEY_BYTES, .is_floor = 1};
    return 1;
}

/* Takes the document's frame from the block where the search in `by_seqno` has ended. */
static void take_frame(const KeyTree *by_seqno, const Search *record, const Search *search,
                       Wanted *wanted)
{
    Node block;
    if (search->outcome != ABSENT || !key_tree_node(by_seqno, search, -1, &block))
        return;
    FrameOf of = {
        be64(record->value + RECORD_SEQNO_AT), be64(record->value + RECORD_CAS_AT),
        wanted->full_key + 2, wanted->key_bytes - 2,
    };
    wanted->frame = block_find_frame(block.key, block.key_bytes, block.value, block.value_bytes,
                                     &of, &wanted->frame_bytes);
    if (wanted->frame != NULL && be16(search->key) == be16(block.key))
        wanted->outcome = FOUND;
}

void stored_documents_find(const KeyTree *by_key, const KeyTree *by_seqno, Wanted *wanted,
                           size_t count)
{
    Search records[SEARCHES_MAX], blocks[SEARCHES_MAX];
    uint8_t block_keys[SEARCHES_MAX][BLOCK_KEY_BYTES];
    size_t of[SEARCHES_MAX], documents = 0;
    for (size_t i = 0; i < count; i++)
        records[i] = (Search){.key = wanted[i].full_key, .key_bytes = wanted[i].key_bytes};
    key_tree_search(by_key, records, count);
    for (size_t i = 0; i < count; i++)
        if (begin_block_search(by_key, &records[i], &wanted[i], block_keys[documents],
                               &blocks[documents]))
            of[documents++] = i;
    key_tree_search(by_seqno, blocks, documents);
    for (size_t i = 0; i < documents; i++)
        take_frame(by_seqno, &records[of[i]], &blocks[i], &wanted[of[i]]);
}
