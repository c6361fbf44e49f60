/* Constants that only the reader and the writer of safetensors use. */
#ifndef TRAIN_SAFETENSORS_FORMAT_H
#define TRAIN_SAFETENSORS_FORMAT_H

enum {
    SAFETENSORS_PREFIX = 8,             // bytes of the header's length
    SAFETENSORS_MAX_HEADER = 100000000, // of the reference reader
    SAFETENSORS_ALIGN = 8               // data start at a multiple of this
};

#define SAFETENSORS_METADATA "__metadata__"

#endif
