/* The type `LogThread`: writes and syncs the log without the interpreter lock.

   A thread of Python needs the interpreter lock after each of its system calls, and waits for it
   while the event loop works. This thread has no part in the interpreter. It takes one write at a
   time, and tells that it is done by eight bytes into a descriptor that the event loop watches.

   Invariants
   - one write at a time: GIVEN, then DONE by the thread, then IDLE by `take`;
   - the thread reads the data of a write only while it is GIVEN, and the buffer is held until
     `take`. So nobody may change the data before that;
   - the state outlives the Python object if the thread does not end (a disk that hangs). It is
     never freed then, and neither is the buffer that the kernel may still read. The thread makes
     no further call then: its descriptors may have become those of other files. */

#ifdef __linux__

#define _GNU_SOURCE
#include "log_thread.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { IDLE, GIVEN, DONE };

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int state, is_closing, has_ended;
    atomic_int is_abandoned;
    int done_fd;
    int fd, sync_fd;
    Py_buffer data;
    off_t at;
    Py_ssize_t written;
    int write_errno, sync_errno;
    int64_t sync_ns;
} Work;

typedef struct {
    PyObject_HEAD
    Work *work; /* NULL: it was closed */
} LogThread;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Writes all of it if the disk takes it, and syncs then. */
static void do_write(Work *work)
{
    const char *data = work->data.buf;
    work->written = 0;
    work->write_errno = work->sync_errno = 0;
    work->sync_ns = 0;
    while (work->written < work->data.len) {
        ssize_t count = pwrite(work->fd, data + work->written,
                               (size_t)(work->data.len - work->written), work->at + work->written);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0) {
            work->write_errno = count ? errno : ENOSPC;
            return;
        }
        work->written += count;
        if (work->is_abandoned)
            return;
    }
    int64_t began_ns = now_ns();
    while (fdatasync(work->sync_fd) < 0) {
        if (errno != EINTR) {
            work->sync_errno = errno;
            break;
        }
    }
    work->sync_ns = now_ns() - began_ns;
}

static void tell(int fd)
{
    const uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void *run(void *argument)
{
    Work *work = argument;
    pthread_mutex_lock(&work->lock);
    for (;;) {
        while (work->state != GIVEN && !work->is_closing)
            pthread_cond_wait(&work->changed, &work->lock);
        if (work->state != GIVEN)
            break;
        pthread_mutex_unlock(&work->lock);
        do_write(work);
        pthread_mutex_lock(&work->lock);
        work->state = DONE;
        /* With the lock, so that `close` cannot return, and the descriptor be another file, before
           this. It does not wait: nothing else fills the descriptor. */
        if (!work->is_abandoned)
            tell(work->done_fd);
        pthread_cond_broadcast(&work->changed);
    }
    work->has_ended = 1;
    pthread_cond_broadcast(&work->changed);
    pthread_mutex_unlock(&work->lock);
    return NULL;
}

/* No signal interrupts the thread: Python's handlers belong to the main thread. */
static int start(Work *work)
{
    pthread_attr_t detached;
    sigset_t all, before;
    pthread_t thread;
    if (pthread_attr_init(&detached) != 0)
        return 0;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int outcome = pthread_create(&thread, &detached, run, work);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
    errno = outcome;
    return outcome == 0;
}

static Work *new_work(int done_fd)
{
    pthread_condattr_t monotonic;
    Work *work = calloc(1, sizeof *work);
    if (work == NULL)
        return NULL;
    work->done_fd = done_fd;
    pthread_mutex_init(&work->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&work->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (start(work))
        return work;
    free(work);
    return NULL;
}

static int is_idle(const Work *work)
{
    return work->state != GIVEN;
}

static int has_ended(const Work *work)
{
    return work->has_ended;
}

/* Waits until something is so, or the time is over; returns whether it is. With the lock, and
   without the interpreter's. */
static int wait_until(Work *work, int (*is_so)(const Work *), double seconds)
{
    struct timespec until;
    int64_t until_ns = now_ns() + (int64_t)(seconds * 1e9);
    until.tv_sec = (time_t)(until_ns / 1000000000);
    until.tv_nsec = (long)(until_ns % 1000000000);
    for (int waited = 0; !is_so(work) && waited == 0;)
        waited = pthread_cond_timedwait(&work->changed, &work->lock, &until);
    return is_so(work);
}

/* Ends the thread; returns whether it has ended within the time. */
static int close_work(LogThread *self, double seconds)
{
    Work *work = self->work;
    if (work == NULL)
        return 1;
    int is_over;
    self->work = NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&work->lock);
    work->is_closing = 1;
    pthread_cond_broadcast(&work->changed);
    is_over = wait_until(work, has_ended, seconds);
    work->is_abandoned = !is_over;
    pthread_mutex_unlock(&work->lock);
    Py_END_ALLOW_THREADS
    if (is_over) {
        if (work->state != IDLE)
            PyBuffer_Release(&work->data);
        free(work);
    }
    return is_over;
}

static PyObject *log_thread_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int done_fd;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "LogThread() takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "i", &done_fd))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    LogThread *self = (LogThread *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    self->work = new_work(done_fd);
    if (self->work == NULL) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void log_thread_dealloc(LogThread *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    close_work(self, 0.0);
    release(self);
    Py_DECREF(type);
}

static Work *in_state(LogThread *self, int state, const char *otherwise)
{
    if (self->work != NULL) {
        pthread_mutex_lock(&self->work->lock);
        int is_so = self->work->state == state;
        pthread_mutex_unlock(&self->work->lock);
        if (is_so)
            return self->work;
    }
    PyErr_SetString(PyExc_ValueError, otherwise);
    return NULL;
}

static PyObject *log_thread_give(LogThread *self, PyObject *args)
{
    int fd, sync_fd;
    long long at;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "iiy*L", &fd, &sync_fd, &data, &at))
        return NULL;
    Work *work = in_state(self, IDLE, "the thread is closed, or its last result was not taken");
    if (work == NULL) {
        PyBuffer_Release(&data);
        return NULL;
    }
    pthread_mutex_lock(&work->lock);
    work->fd = fd;
    work->sync_fd = sync_fd;
    work->data = data;
    work->at = (off_t)at;
    work->state = GIVEN;
    pthread_cond_broadcast(&work->changed);
    pthread_mutex_unlock(&work->lock);
    Py_RETURN_NONE;
}

static PyObject *log_thread_take(LogThread *self, PyObject *Py_UNUSED(ignored))
{
    Work *work = in_state(self, DONE, "nothing is done");
    if (work == NULL)
        return NULL;
    int is_whole = work->written == work->data.len;
    PyBuffer_Release(&work->data);
    pthread_mutex_lock(&work->lock);
    work->state = IDLE;
    pthread_mutex_unlock(&work->lock);
    return Py_BuildValue("(NiiL)", PyBool_FromLong(is_whole), work->write_errno, work->sync_errno,
                         (long long)work->sync_ns);
}

static PyObject *log_thread_wait(LogThread *self, PyObject *args)
{
    double seconds;
    Work *work = self->work;
    if (!PyArg_ParseTuple(args, "d", &seconds))
        return NULL;
    if (work == NULL)
        Py_RETURN_TRUE;
    int is_over;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&work->lock);
    is_over = wait_until(work, is_idle, seconds);
    pthread_mutex_unlock(&work->lock);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(is_over);
}

static PyObject *log_thread_close(LogThread *self, PyObject *args)
{
    double seconds;
    if (!PyArg_ParseTuple(args, "d", &seconds))
        return NULL;
    return PyBool_FromLong(close_work(self, seconds));
}

static PyMethodDef methods[] = {
    {"give", (PyCFunction)log_thread_give, METH_VARARGS, NULL},
    {"take", (PyCFunction)log_thread_take, METH_NOARGS, NULL},
    {"wait", (PyCFunction)log_thread_wait, METH_VARARGS, NULL},
    {"close", (PyCFunction)log_thread_close, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, log_thread_new},
    {Py_tp_dealloc, log_thread_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec log_thread_spec = {
    .name = "vbucket.native.loops.LogThread",
    .basicsize = sizeof(LogThread),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

#else

#include "log_thread.h"

#endif
