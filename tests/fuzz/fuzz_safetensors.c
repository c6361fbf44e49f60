/* Any bytes as a safetensors file. Every tensor of a file that is accepted can be found by its name and read
 * to its last byte. */
#include "tests/fuzz/fuzz.h"
#include "train/files/safetensors.h"

#include <string.h>

static void check_tensor(const safetensors *file, const tensor *t, const uint8_t *bytes, size_t size)
{
    int64_t elements, count;
    PROMISE(tensor_size(t, &elements, &count));
    const uint8_t *data = t->data;
    PROMISE(data >= bytes && data <= bytes + size && count <= bytes + size - data);
    PROMISE(safetensors_find(file, t->name) == t);
    volatile uint8_t sum = 0; // reads every byte, so that the address sanitizer checks each address
    for (int64_t i = 0; i < count; i++) sum = (uint8_t)(sum + data[i]);

    float *out = malloc((size_t)elements * sizeof *out + 1);
    error err;
    PROMISE(out != NULL);
    bool is_float = t->dtype <= TENSOR_BF16;
    PROMISE(tensor_read_f32(t, t->rank, t->shape, out, &err) == is_float);
    PROMISE(!tensor_read_f32(t, t->rank + 1, t->shape, out, &err));
    free(out);
}

bool fuzz_accepts(const uint8_t *bytes, size_t size)
{
    safetensors *file;
    error err = {0};
    if (!safetensors_parse(&file, bytes, size, "fuzz", &err)) {
        PROMISE(file == NULL && err.code == ERROR_RUNTIME && err.text[0] != '\0');
        return false;
    }
    for (size_t i = 0; i < safetensors_count(file); i++)
        check_tensor(file, safetensors_at(file, i), bytes, size);
    PROMISE(safetensors_at(file, safetensors_count(file)) == NULL);
    safetensors_metadata(file, "format");
    safetensors_close(file);
    return true;
}
