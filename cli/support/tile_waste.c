/* See tile_waste.h. */
#include "cli/support/tile_waste.h"

#include <math.h>

static int64_t padded(int64_t count)
{
    return (count + GEMM_ROW_TILE - 1) / GEMM_ROW_TILE * GEMM_ROW_TILE;
}

/* The probability that the rule takes hi = M ceil(c/M) instead of lo = M floor(c/M). */
static double picks_hi(const smoe_layer *layer, int64_t above, int64_t hi)
{
    if (above == 0 || hi > layer->tokens) return 0;
    switch (layer->rounding) {
    case SMOE_ROUNDING_NR_F:
    case SMOE_ROUNDING_NR_S: return 2 * above > layer->tile;
    case SMOE_ROUNDING_SR_F:
    case SMOE_ROUNDING_BALANCE_F: return (double)above / layer->tile;
    case SMOE_ROUNDING_UP: return 1;
    case SMOE_ROUNDING_NONE:
    case SMOE_ROUNDING_DOWN: return 0;
    }
    return 0;
}

/* Expected rows and expected padded rows of an expert that plain top-K gives c tokens. */
static void add_count(const smoe_layer *layer, int64_t c, double probability, double *rows, double *with_pad)
{
    if (layer->rounding == SMOE_ROUNDING_NONE) {
        *rows += probability * (double)c;
        *with_pad += probability * (double)padded(c);
        return;
    }
    const int64_t lo = c / layer->tile * layer->tile, hi = lo + layer->tile;
    const double up = picks_hi(layer, c - lo, hi);
    *rows += probability * (up * (double)hi + (1 - up) * (double)lo);
    *with_pad += probability * (up * (double)padded(hi) + (1 - up) * (double)padded(lo));
}

double tile_waste(const smoe_layer *layer)
{
    const double tokens = (double)layer->tokens, share = (double)layer->topk / (double)layer->experts;
    double rows = 0, with_pad = 0;
    if (share >= 1) {
        add_count(layer, layer->tokens, 1, &rows, &with_pad);
    } else {
        // Terms further than 12 standard deviations from the mean add nothing at double precision.
        const double mean = tokens * share, reach = 12 * sqrt(mean * (1 - share)) + 12;
        const int64_t first = mean > reach ? (int64_t)(mean - reach) : 0;
        const int64_t last = mean + reach < tokens ? (int64_t)(mean + reach) : layer->tokens;
        for (int64_t c = first; c <= last; c++) {
            const double k = (double)c;
            const double log_probability = lgamma(tokens + 1) - lgamma(k + 1) - lgamma(tokens - k + 1) +
                                           k * log(share) + (tokens - k) * log1p(-share);
            add_count(layer, c, exp(log_probability), &rows, &with_pad);
        }
    }
    return with_pad > 0 ? 1 - rows / with_pad : 0;
}
