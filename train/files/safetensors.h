/* Tensors in files: the safetensors format, read through a mapping and written atomically.
 *
 *     file   = u64 little-endian length L | header, L bytes of JSON | data
 *     header = {"name": {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, ...,
 *               "__metadata__": {str: str}}
 *
 * Offsets count from the end of the header. A file is accepted if L <= 100,000,000, the header starts with
 * '{' and has no key twice, the size of every tensor equals its byte range, and the ranges cover the data
 * without gap or overlap. So every byte of the file has exactly one meaning. */
#ifndef TRAIN_SAFETENSORS_H
#define TRAIN_SAFETENSORS_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum tensor_dtype {
    TENSOR_F64,
    TENSOR_F32,
    TENSOR_F16,
    TENSOR_BF16,
    TENSOR_I64,
    TENSOR_I32,
    TENSOR_I16,
    TENSOR_I8,
    TENSOR_U8,
    TENSOR_BOOL,
    TENSOR_DTYPES // how many
} tensor_dtype;

enum { TENSOR_MAX_RANK = 8 };

typedef struct tensor {
    const char *name; // UTF-8
    tensor_dtype dtype;
    int rank;                       // 0: a scalar
    int64_t shape[TENSOR_MAX_RANK]; // row-major, the last dimension is contiguous; 0 is legal
    const void *data;               // little-endian; in a mapped file not necessarily aligned
} tensor;

size_t tensor_dtype_size(tensor_dtype dtype);      // bytes of an element
const char *tensor_dtype_name(tensor_dtype dtype); // "F32", ...

/* The number of elements and of bytes of a tensor's shape. False (and 0) if a dimension is negative or a
 * product exceeds 2^63 - 1. */
bool tensor_size(const tensor *t, int64_t *elements, int64_t *bytes);

/* True if the tensor has exactly this shape and its dtype is F32, F16, BF16 or F64. Otherwise the error names
 * both ranks, shapes or dtypes. */
bool tensor_is_real(const tensor *t, int rank, const int64_t *shape, error *err);

/* Copies elements [first, first + count) of a tensor that tensor_is_real has accepted to out, as f32. F32,
 * F16 and BF16 are copied exactly, F64 is rounded to nearest. */
void tensor_read_part(const tensor *t, int64_t first, int64_t count, float *out);

/* Both functions above, for a whole tensor. */
bool tensor_read_f32(const tensor *t, int rank, const int64_t *shape, float *out, error *err);

/* ---- reading: tensors point into the mapping and live until safetensors_close ---- */

typedef struct safetensors safetensors;

/* Opens one file. If the path ends in ".index.json", it opens all shards that its weight_map names; they are
 * in the same folder. */
bool safetensors_open(safetensors **file, const char *path, error *err);

/* Reads from memory, which must outlive *file; `name` names the file in messages. */
bool safetensors_parse(safetensors **file, const void *bytes, size_t size, const char *name, error *err);

void safetensors_close(safetensors *file); // NULL is fine

/* Says that elements [first, first + count) will not be read again soon. Their pages of the mapping are
 * released from this process's memory. */
void safetensors_forget(const safetensors *file, const tensor *t, int64_t first, int64_t count);

size_t safetensors_count(const safetensors *file);
const tensor *safetensors_at(const safetensors *file, size_t index);       // sorted by name
const tensor *safetensors_find(const safetensors *file, const char *name); // NULL: not there

/* As safetensors_find, with an error that names file and tensor. */
bool safetensors_get(const safetensors *file, const char *name, const tensor **found, error *err);

/* The value of a key of __metadata__ (of the first shard that has it), NULL: not there. */
const char *safetensors_metadata(const safetensors *file, const char *key);

/* ---- writing ---- */

typedef struct safetensors_pair {
    const char *key, *value; // UTF-8
} safetensors_pair;

/* Writes tensors of the caller's memory and metadata, atomically (train/files/file.h). In the file tensors
 * with larger elements come first, then tensors are sorted by name, and the data start at a multiple of 8
 * bytes. So every tensor is aligned, and the bytes of the file do not depend on the order of the arguments.
 * Errors: a name occurs twice, is "__metadata__" or is not UTF-8; a shape exceeds 63 bits; the header exceeds
 * the limit of the format; or an error of file_writer. */
bool safetensors_write(const char *path, const tensor *tensors, size_t count,
                       const safetensors_pair *metadata, size_t pairs, error *err);

/* Returns `size` bytes (at most `most` of the call below) of tensor number `index`, from its byte `from` on.
 * They are valid until the next call. On failure: NULL and *err. */
typedef const void *(*safetensors_source)(void *user, size_t index, size_t from, size_t size, error *err);

/* The same, but the source gives the bytes, part by part; NULL: they are left zero. The data pointers of the
 * tensors are not read. */
bool safetensors_write_from(const char *path, const tensor *tensors, size_t count,
                            const safetensors_pair *metadata, size_t pairs, safetensors_source source,
                            void *user, size_t most, error *err);

#endif
