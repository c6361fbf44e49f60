/* Activations, their derivatives (called slopes here), and the exp that they use.
 *
 * Every curve is a function of one float, without branches, that returns value and slope. It is inlined into
 * the loops below, which the compiler vectorises. If the compiler supports it, each loop is built for several
 * vector widths, and the loader picks one. All of them give the same bits, because multiplications and
 * additions are never contracted (-ffp-contract=off). */
#include "activation.h"
#include "activations.h"

#include <assert.h>
#include <string.h>

static_assert(sizeof(float) == 4, "bit tricks on IEEE single precision");

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

/* Not with sanitizers: they instrument the function that picks the version, and it runs before they are
 * ready. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__) &&                 \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTOR_CLONES
#endif

typedef struct curve {
    float value;
    float slope;
} curve;

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* condition ? yes : no without a branch. With one, gcc does not vectorise the loops for plain SSE2. */
INLINE float choose(int condition, float yes, float no)
{
    const uint32_t mask = 0U - (uint32_t)condition;
    return float_of((bits_of(yes) & mask) | (bits_of(no) & ~mask));
}

/* exp(x + tail) for x <= 0 and a tail of rounding size; 0 where it would be below the normal numbers.
 * Adding 1.5 2^23 leaves round(x / ln 2) in the low bits of the sum, which shift straight into an exponent.
 */
INLINE float exp_negative(float x, float tail)
{
    const float magic = 12582912.0f;
    const float inside = choose(x < -87.0f, -87.0f, x);
    const float shifted = inside * 1.44269504f + magic;
    const float count = shifted - magic;
    const float r = ((inside - count * 0.693359375f) - count * -2.12194440e-4f) + tail;
    /* exp(r) = 1 + r + r^2 q(r): q minimax on |r| <= 0.35, relative error of exp 3.3e-9 */
    float q = 0.0013813161f;
    q = q * r + 0.0083694104f;
    q = q * r + 0.041668456f;
    q = q * r + 0.16666515f;
    q = q * r + 0.49999994f;
    const float power = float_of((bits_of(shifted) << 23) + 0x3f800000U);
    const float result = (1.0f + (r + r * r * q)) * power;
    return choose(x < -87.0f, 0.0f, result);
}

/* sigmoid(x) and sigmoid(-x), each without cancellation. */
typedef struct sigmoids {
    float plus;
    float minus;
} sigmoids;

INLINE sigmoids sigmoid(float x)
{
    const float e = exp_negative(choose(x < 0.0f, x, -x), 0.0f);
    const float big = 1.0f / (1.0f + e);
    const float small = e * big;
    return (sigmoids){choose(x < 0.0f, small, big), choose(x < 0.0f, big, small)};
}

/* Every curve takes the layer's values; most need none. */
INLINE curve silu(float x, moe_gate_values v)
{
    (void)v;
    const sigmoids s = sigmoid(x);
    return (curve){x * s.plus, s.plus * (1.0f + x * s.minus)};
}

/* x sigmoid(alpha x). Past 100 the sigmoid is 0 or 1. */
INLINE curve swish(float x, float alpha)
{
    const float z = alpha * x;
    const sigmoids s = sigmoid(z);
    const float inside = choose(z < -100.0f, -100.0f, choose(z > 100.0f, 100.0f, z));
    return (curve){x * s.plus, s.plus * (1.0f + inside * s.minus)};
}

INLINE curve swish_clamped(float x, moe_gate_values v)
{
    const int beyond = x > v.gate_limit;
    const curve c = swish(choose(beyond, v.gate_limit, x), v.alpha);
    return (curve){c.value, choose(beyond, 0.0f, c.slope)};
}

/* Near 0, tanh(x) = x + x z q(z), z = x^2: q minimax on |x| <= 0.625, relative error of tanh 4.4e-9. */
INLINE curve tanh_curve(float x)
{
    const float size = choose(x < 0.0f, -x, x);
    const float e = exp_negative(-2.0f * size, 0.0f), share = 1.0f / (1.0f + e);
    const float far = (1.0f - e) * share, near = choose(size > 0.625f, 0.625f, size), z = near * near;
    float q = -0.0057049633f;
    q = q * z + 0.020639064f;
    q = q * z + -0.053739707f;
    q = q * z + 0.13331442f;
    q = q * z + -0.33333282f;
    const float value = choose(size > 0.625f, far, near + near * z * q);
    return (curve){choose(x < 0.0f, -value, value), 4.0f * e * share * share};
}

/* limit tanh(x/limit) */
INLINE curve capped(float x, float limit)
{
    const curve t = tanh_curve(x / limit);
    return (curve){limit * t.value, t.slope};
}

INLINE curve swish_capped(float x, moe_gate_values v)
{
    const curve c = capped(x, v.gate_limit);
    const sigmoids s = sigmoid(v.alpha * x);
    return (curve){c.value * s.plus, s.plus * (c.slope + v.alpha * c.value * s.minus)};
}

/* x Phi(x). The upper tail Phi(-|x|) = exp(-x^2/2) g(|x|), g = erfcx(|x|/sqrt 2)/2 as a polynomial in
 * t = 1/(1 + 0.3 |x|), minimax on 0..14.5, relative error 3.5e-9. x^2/2 is split into an exact head, from the
 * upper 12 bits of x, and a tail; otherwise the rounding error of x^2 would appear in the far tail. */
INLINE curve gelu(float x, moe_gate_values v)
{
    (void)v;
    const float size = choose(x < 0.0f, -x, x);
    const float z = choose(size > 14.5f, 14.5f, size);
    const float head = float_of(bits_of(z) & 0xfffff000U);
    const float bell = exp_negative(-0.5f * (head * head), -0.5f * ((z - head) * (z + head)));
    const float t = 1.0f / (1.0f + 0.3f * z);
    float g = -0.020623494f;
    g = g * t + 0.11243575f;
    g = g * t + -0.22821392f;
    g = g * t + 0.19178496f;
    g = g * t + -0.079423845f;
    g = g * t + 0.096157022f;
    g = g * t + 0.078389585f;
    g = g * t + 0.11023544f;
    g = g * t + 0.11957181f;
    g = g * t + 0.11968669f;
    const float tail = bell * (g * t);
    const float phi = choose(x < 0.0f, tail, 1.0f - tail);
    const float signed_z = choose(x < 0.0f, -z, z);
    return (curve){x * phi, phi + signed_z * (bell * 0.39894228f)};
}

/* x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), which is gelu's tanh form; past |x| = 16 the sigmoid is 0 or 1.
 */
INLINE curve gelu_tanh(float x, moe_gate_values v)
{
    (void)v;
    const float low = choose(x < -16.0f, -16.0f, x);
    const float z = choose(low > 16.0f, 16.0f, low);
    const float square = z * z;
    const sigmoids s = sigmoid(1.5957691f * (z + 0.044715f * square * z));
    const float inner = 1.5957691f * (1.0f + 0.134145f * square);
    return (curve){x * s.plus, s.plus * (1.0f + z * s.minus * inner)};
}

/* The comparisons of these two are written so that NaN stays NaN. */
INLINE curve relu(float x, moe_gate_values v)
{
    (void)v;
    return (curve){choose(x <= 0.0f, 0.0f, x), choose(x <= 0.0f, 0.0f, 1.0f)};
}

INLINE curve relu_squared(float x, moe_gate_values v)
{
    (void)v;
    const float positive = choose(x <= 0.0f, 0.0f, x);
    return (curve){positive * positive, 2.0f * positive};
}

typedef curve (*curve_function)(float, moe_gate_values);

/* What multiplies the gate's curve, as a function of u. */
INLINE curve gated_up(float u, moe_gate_values v)
{
    (void)v;
    return (curve){u, 1.0f};
}

INLINE curve clamped_up(float u, moe_gate_values v)
{
    const int above = u > v.up_limit, below = u < -v.up_limit;
    const float inside = choose(above, v.up_limit, choose(below, -v.up_limit, u));
    return (curve){inside + v.offset, choose(above | below, 0.0f, 1.0f)};
}

INLINE curve capped_up(float u, moe_gate_values v)
{
    const curve c = capped(u, v.up_limit);
    return (curve){c.value + v.offset, c.slope};
}

INLINE void forward(curve_function f, moe_gate_values v, int64_t n, const float *restrict h,
                    float *restrict a)
{
    for (int64_t j = 0; j < n; j++) a[j] = f(h[j], v).value;
}

INLINE void forward_gated(curve_function f, curve_function up, moe_gate_values v, int64_t n,
                          const float *restrict h, float *restrict a)
{
    const float *restrict u = h + n;
    for (int64_t j = 0; j < n; j++) a[j] = f(h[j], v).value * up(u[j], v).value;
}

#define FORWARD_plain(f)   forward(f, v, n, h, a)
#define FORWARD_gated(f)   forward_gated(f, gated_up, v, n, h, a)
#define FORWARD_clamped(f) forward_gated(f, clamped_up, v, n, h, a)
#define FORWARD_capped(f)  forward_gated(f, capped_up, v, n, h, a)

VECTOR_CLONES void moe_activate(const smoe_layer *layer, int64_t n, const float *h, float *a)
{
    const moe_gate_values v = moe_gate_values_of(layer);
    switch (layer->activation) {
#define FORWARD(enumerator, name, shape, curve)                                                              \
    case enumerator: FORWARD_##shape(curve); break;
        MOE_ACTIVATIONS(FORWARD)
#undef FORWARD
    }
}

INLINE void backward(curve_function f, moe_gate_values v, int64_t n, const float *restrict h,
                     const float *restrict da, float weight, float *restrict a, float *restrict dh)
{
    for (int64_t j = 0; j < n; j++) {
        const curve c = f(h[j], v);
        a[j] = c.value;
        dh[j] = weight * da[j] * c.slope;
    }
}

INLINE void backward_gated(curve_function f, curve_function up, moe_gate_values v, int64_t n,
                           const float *restrict h, const float *restrict da, float weight, float *restrict a,
                           float *restrict dh)
{
    const float *restrict u = h + n;
    float *restrict dup = dh + n;
    for (int64_t j = 0; j < n; j++) {
        const curve c = f(h[j], v), w = up(u[j], v);
        const float d = weight * da[j];
        a[j] = c.value * w.value;
        dh[j] = d * w.value * c.slope;
        dup[j] = d * c.value * w.slope;
    }
}

#define BACKWARD_plain(f)   backward(f, v, n, h, da, weight, a, dh)
#define BACKWARD_gated(f)   backward_gated(f, gated_up, v, n, h, da, weight, a, dh)
#define BACKWARD_clamped(f) backward_gated(f, clamped_up, v, n, h, da, weight, a, dh)
#define BACKWARD_capped(f)  backward_gated(f, capped_up, v, n, h, da, weight, a, dh)

VECTOR_CLONES void moe_activate_backward(const smoe_layer *layer, int64_t n, const float *h, const float *da,
                                         float weight, float *a, float *dh)
{
    const moe_gate_values v = moe_gate_values_of(layer);
    switch (layer->activation) {
#define BACKWARD(enumerator, name, shape, curve)                                                             \
    case enumerator: BACKWARD_##shape(curve); break;
        MOE_ACTIVATIONS(BACKWARD)
#undef BACKWARD
    }
}

enum { LANES = 16 };

float moe_dot(int64_t n, const float *x, const float *y)
{
    float sums[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += x[i + lane] * y[i + lane];
    for (int lane = 0; i + lane < n; lane++) sums[lane] += x[i + lane] * y[i + lane];
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
    return sums[0];
}
