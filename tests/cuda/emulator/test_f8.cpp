// The emulated e4m3 instructions: wgmma's sums against the oracle's model, conversion against f8.h.
#include "sm90/f8.cuh"

#include "f8.h"
#include <vector>

extern "C" {
#include "oracle/f8.h"
}

using namespace moe;

static uint64_t state = 1;

static uint32_t draw()
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

// Two instructions one after the other, with bytes of exponents `least` to `least` + span - 1 and zeros.
static int sums_differ(int least, int span)
{
    e4m3_parts a[2][32], b[2][32];
    double left[64], right[64];
    for (int i = 0; i < 64; i++) {
        uint8_t bytes[2];
        for (uint8_t &byte : bytes) {
            const uint32_t bits = draw();
            byte = bits % 9 == 0 ? 0 : (uint8_t)((bits & 0x87) | (least + (int)(bits >> 16) % span) << 3);
            if ((byte & 0x7f) == 0x7f) byte ^= 1; // no NaN
        }
        a[i / 32][i % 32] = parts_of_e4m3(bytes[0]), left[i] = moe_f8_value(bytes[0]);
        b[i / 32][i % 32] = parts_of_e4m3(bytes[1]), right[i] = moe_f8_value(bytes[1]);
    }
    const float first = tensor_core<e4m3>::sum(0.0f, a[0], b[0]),
                got = tensor_core<e4m3>::sum(first, a[1], b[1]);
    return (double)got != oracle_f8_sum({left, 1}, {right, 1}, 64, true);
}

int main()
{
    int wrong = 0;
    for (int i = 0; i < 20000; i++) wrong += sums_differ(i % 12, 1 + i % 5) + sums_differ(0, 16);
    printf("%d of 40000 sums differ\n", wrong);
    int bytes = 0;
    for (int i = 0; i < 1000000; i++) { // all exponents near those of e4m3, and any bits
        const uint32_t bits = draw();
        const float x = moe_float_of(i & 1 ? bits : (bits & 0x807fffff) | (110 + (bits >> 23) % 30) << 23);
        bytes += to_e4m3(x) != moe_f8_of(x);
    }
    for (int i = 0; i < 256; i++) { // values, and the middles between two
        const float v = moe_f8_value((uint8_t)i), next = moe_f8_value((uint8_t)(i + 1));
        bytes += to_e4m3(v) != moe_f8_of(v) || to_e4m3((v + next) / 2) != moe_f8_of((v + next) / 2);
    }
    printf("%d conversions differ\n", bytes);
    e4m3_parts one[32];
    for (e4m3_parts &p : one) p = parts_of_e4m3(0x38);
    e4m3_parts broken[32];
    std::copy(one, one + 32, broken);
    broken[7] = parts_of_e4m3(0xff);
    const float nan = tensor_core<e4m3>::sum(0.0f, one, broken);
    return wrong || bytes || nan == nan;
}
