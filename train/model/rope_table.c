/* See rope_table.h. */
#include "train/model/rope_table.h"

#include <math.h>

void rope_table(float *table, int64_t context, int64_t head_size, double theta)
{
    int64_t half = head_size / 2;
    for (int64_t p = 0; p < context; p++)
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)p * pow(theta, -2.0 * (double)i / (double)head_size);
            table[p * head_size + i] = (float)cos(angle);
            table[p * head_size + half + i] = (float)sin(angle);
        }
}
