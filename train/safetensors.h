/* Tensors in files: the safetensors format, read through a mapping and written atomically.
 *
 *     file   = u64 little-endian length L | header, L bytes of JSON | data
 *     header = {"name": {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, ...,
 *               "__metadata__": {str: str}}
 *
 * Offsets count from the end of the header. A file is accepted when L <= 100,000,000 and the header starts
 * with '{', has no key twice, every shape times its dtype is its byte range, and the ranges tile the data
 * without hole or overlap: then every byte of the file has one meaning. */
#ifndef TRAIN_SAFETENSORS_H
#define TRAIN_SAFETENSORS_H

#include "common/error.h"

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

/* Elements and bytes of a tensor's shape; false (and 0) if a dimension is negative or a product passes 2^63
 * - 1. */
bool tensor_size(const tensor *t, int64_t *elements, int64_t *bytes);

/* True for a tensor of exactly this shape whose dtype is F32, F16, BF16 or F64. Errors: another rank, shape
 * or dtype, naming both. */
bool tensor_is_real(const tensor *t, int rank, const int64_t *shape, error *err);

/* Copies elements [first, first + count) of a tensor that is real into out, as f32: F32 as is, F16 and BF16
 * exactly, F64 rounded to nearest. */
void tensor_read_part(const tensor *t, int64_t first, int64_t count, float *out);

/* Both, for a whole tensor. */
bool tensor_read_f32(const tensor *t, int rank, const int64_t *shape, float *out, error *err);

/* ---- reading: tensors point into the mapping and live until safetensors_close ---- */

typedef struct safetensors safetensors;

/* One file; or, for a path that ends in ".index.json", all shards that its weight_map names, beside it. */
bool safetensors_open(safetensors **file, const char *path, error *err);

/* From memory, which must outlive *file; `name` stands for the file in messages. */
bool safetensors_parse(safetensors **file, const void *bytes, size_t size, const char *name, error *err);

void safetensors_close(safetensors *file); // NULL is fine

/* Elements [first, first + count) were read and will not be soon: their pages of the mapping leave this
 * process's memory. */
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

/* Writes tensors of the caller's memory and metadata, atomically (train/file.h). In the file larger elements
 * come first, then names in order, and data start 8-aligned: so every tensor is aligned and equal contents
 * give equal bytes whatever the order of the call. Errors: a name twice, "__metadata__" or not UTF-8, a shape
 * past 63 bits, header past the format's limit, everything that file_writer reports. */
bool safetensors_write(const char *path, const tensor *tensors, size_t count,
                       const safetensors_pair *metadata, size_t pairs, error *err);

/* Gives `size` bytes (at most `most` of the call below) of tensor number `index`, from its byte `from` on.
 * They stay until the next call. NULL and *err: they cannot be had. */
typedef const void *(*safetensors_source)(void *user, size_t index, size_t from, size_t size, error *err);

/* The same with bytes that the source gives, piece by piece; the tensors' data are not read. */
bool safetensors_write_from(const char *path, const tensor *tensors, size_t count,
                            const safetensors_pair *metadata, size_t pairs, safetensors_source source,
                            void *user, size_t most, error *err);

#endif
