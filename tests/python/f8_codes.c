/* Copies floats from the standard input as bytes of e4m3 to the standard output, or with the argument
 * `decode` bytes as floats. For test_f8.py. */
#include "f8.h"

#include <stdio.h>

int main(int count, char **arguments)
{
    (void)arguments;
    float value;
    uint8_t byte;
    while (count > 1 ? fread(&byte, 1, 1, stdin) : fread(&value, sizeof value, 1, stdin)) {
        if (count > 1)
            value = moe_f8_value(byte);
        else
            byte = moe_f8_of(value);
        if (!(count > 1 ? fwrite(&value, sizeof value, 1, stdout) : fwrite(&byte, 1, 1, stdout))) return 3;
    }
    return fflush(stdout) ? 3 : 0;
}
