/* Where the tensors live: a small table of operations on memory and streams, one for each backend, so that
 * a check or a benchmark is written once. Pointers from alloc are the backend's own (host memory for the cpu)
 * and go into the library's argument structs; upload and download move bytes between them and host memory. */
#ifndef HARNESS_DEVICE_H
#define HARNESS_DEVICE_H

#include <smoe.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DEVICE_ALIGN = 256 }; /* of every pointer from alloc: what the library asks of saved and scratch */

typedef struct device {
    const char *name; /* as given to --device */
    smoe_backend backend;
    void *(*alloc)(size_t bytes);  /* aligned to DEVICE_ALIGN; NULL: no memory; 0 bytes are allowed */
    void (*release)(void *memory); /* NULL is fine */
    bool (*upload)(void *to, const void *from_host, size_t bytes);
    bool (*download)(void *to_host, const void *from, size_t bytes);
    bool (*copy)(void *to, const void *from, size_t bytes); /* both from alloc */
    bool (*set)(void *to, int byte, size_t bytes);
    bool (*use)(int number);     /* makes the device with this number the thread's current one */
    int (*current)(void);        /* its number */
    bool (*sync)(void);          /* waits for all work; false when some of it failed */
    uint64_t (*available)(void); /* bytes that alloc can still give, about; 0 when the device does not say */
    void (*describe)(char *text, size_t size, int threads); /* "NVIDIA H200"; the CPU with its threads */
    bool (*open_stream)(void **stream); /* in order with the operations above; the cpu's is NULL */
    void (*close_stream)(void *stream);
    /* Captures what enqueue puts on a stream in a CUDA graph, launches it `times` and waits; NULL: no graphs.
     */
    bool (*replay)(bool (*enqueue)(void *user, void *stream), void *user, int times);
    void *(*open_traffic)(void);          /* copies beside other work; NULL: not supported, or no memory */
    bool (*drive_traffic)(void *traffic); /* enqueues about a millisecond of copies */
    void (*close_traffic)(void *traffic); /* waits for them; NULL is fine */
} device;

#ifdef SMOE_HAVE_CUDA
extern const device device_cuda; /* device_cuda.c */
#endif

/* The table named "cpu" or "cuda"; NULL when this build has no such backend. */
const device *device_find(const char *name);

#endif
