/* The bytes of a GET: its request, the entry of its document, and its answer. */

#ifndef DCPD_GET_REQUEST_H
#define DCPD_GET_REQUEST_H

#include "key_form.h"

#define GET_DATATYPES 3          /* JSON and Snappy: what a client may know */

typedef struct {
    const uint8_t *at;
    uint32_t vb_id, key_bytes; /* the key is that which is stored, with its prefix */
    uint8_t form;
} GetRequest;

/* What is said of a key that does not exist. */
typedef struct {
    const uint8_t *at;
    size_t bytes;
} MissText;

/* Reads a request. Returns 0 if it is no plain GET, GETQ, GETK or GETKQ, or not there wholly. */
int get_request_read(GetRequest *request, const uint8_t *at, size_t bytes, uint8_t form,
                     uint32_t partitions);

size_t get_request_bytes(const GetRequest *request);

/* Writes the stored key. */
void get_request_key_write(const GetRequest *request, uint8_t *to);

/* Returns bytes, or NULL with an exception. */
PyObject *get_request_key(const GetRequest *request);

/* Whether what memory has of a key is a document that is sent as it is stored. Only then may the
   functions below read it. `known`: the datatypes of the client, of GET_DATATYPES. */
int entry_is_shown(PyObject *entry, const GetRequest *request, uint8_t known, uint64_t now_s);

size_t entry_value_bytes(PyObject *entry, const GetRequest *request);

/* Of an answer; 0: a quiet GET has none. `entry` NULL: KEY_ENOENT. */
size_t get_answer_bytes(PyObject *entry, const GetRequest *request, const MissText *miss);

/* Writes an answer that has bytes; returns where the next one begins. `entry` NULL: KEY_ENOENT. */
uint8_t *get_answer_write(uint8_t *at, PyObject *entry, const GetRequest *request, uint8_t known,
                          const MissText *miss);

#endif
