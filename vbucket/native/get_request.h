/* The bytes of a GET: its request, the entry of its document, and its answer. */

#ifndef DCPD_GET_REQUEST_H
#define DCPD_GET_REQUEST_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define GET_DATATYPES 3          /* JSON and Snappy: what a client may know */

typedef struct {
    const uint8_t *at;
    uint32_t vb_id, key_bytes;
} GetRequest;

/* Reads a request. Returns 0 if it is no plain GET, or not there wholly. */
int get_request_read(GetRequest *request, const uint8_t *at, size_t bytes);

size_t get_request_bytes(const GetRequest *request);

const uint8_t *get_request_key_at(const GetRequest *request);

/* Returns bytes, or NULL with an exception. */
PyObject *get_request_key(const GetRequest *request);

/* Whether what memory has of a key is a document that is sent as it is stored. Only then may the
   functions below read it. `known`: the datatypes of the client, of GET_DATATYPES. */
int entry_is_shown(PyObject *entry, const GetRequest *request, uint8_t known, uint64_t now_s);

size_t entry_value_bytes(PyObject *entry, const GetRequest *request);

/* Of an answer; `entry` NULL: KEY_ENOENT. */
size_t get_answer_bytes(PyObject *entry, const GetRequest *request);

/* Writes an answer; returns where the next one begins. `entry` NULL: KEY_ENOENT. */
uint8_t *get_answer_write(uint8_t *at, PyObject *entry, const GetRequest *request, uint8_t known);

#endif
