/* The calls of a build of the library, opened at run time, so that one process can compare several builds. */
#ifndef BENCH_BUILD_API_H
#define BENCH_BUILD_API_H

#include <dlfcn.h>
#include <smoe.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct build_api {
    const char *name;     /* of the file, without its folder */
    smoe_kernels kernels; /* for its contexts */
    smoe_status (*create)(smoe_context **, const smoe_context_options *);
    smoe_status (*query_sizes)(smoe_context *, const smoe_layer *, smoe_sizes *);
    smoe_status (*forward)(smoe_context *, const smoe_layer *, const smoe_forward_args *, void *);
    smoe_status (*backward)(smoe_context *, const smoe_layer *, const smoe_backward_args *, void *);
    const char *(*last_error)(const smoe_context *);
} build_api;

/* Copies the address of a function to `member`. dlsym returns it as the address of an object, and ISO C does
 * not define the conversion (POSIX does). */
static inline void build_find(void *member, void *library, const char *build, const char *name)
{
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "%s has no %s\n", build, name);
        exit(3);
    }
    memcpy(member, &found, sizeof found);
}

/* path: of a libsmoe.so; "self" is the program's own library. With ":portable" behind it contexts get the
 * portable kernels. */
static inline build_api build_open(const char *path)
{
    const char *slash = strrchr(path, '/'), *colon = strrchr(path, ':');
    const int portable = colon && strcmp(colon, ":portable") == 0;
    build_api b = {.name = slash ? slash + 1 : path,
                   .kernels = portable ? SMOE_KERNELS_PORTABLE : SMOE_KERNELS_BEST};
    char file[4096];
    snprintf(file, sizeof file, "%.*s", portable ? (int)(colon - path) : (int)strlen(path), path);
    void *library = dlopen(strcmp(file, "self") == 0 ? NULL : file, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    build_find(&b.create, library, b.name, "smoe_create");
    build_find(&b.query_sizes, library, b.name, "smoe_query_sizes");
    build_find(&b.forward, library, b.name, "smoe_layer_forward");
    build_find(&b.backward, library, b.name, "smoe_layer_backward");
    build_find(&b.last_error, library, b.name, "smoe_last_error");
    return b;
}

#endif
