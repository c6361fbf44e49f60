/* libFuzzer's entry point, the same for every target. */
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    fuzz_accepts(bytes, size);
    return 0;
}
