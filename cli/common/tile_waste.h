/* The rows a GEMM of row tile 128 computes for nothing: every expert's count is padded to a multiple of the
 * tile. Under random routing (each token K distinct experts out of E, all alike) an expert's count c is
 * Binomial(T, K/E), so the expectation is exact: waste = E[pad(c) - c] / E[pad(c)].
 *
 * With rounding the count is m, the multiple of the rule's tile that it picks. NR_F, UP and DOWN pick by c
 * alone. SR_F picks hi with probability (c - lo)/M. BALANCE_F and NR_S depend on more than c; they are taken
 * as SR_F and NR_F, whose expectations they follow. */
#ifndef CLI_TILE_WASTE_H
#define CLI_TILE_WASTE_H

#include <smoe.h>

enum { GEMM_ROW_TILE = 128 };

/* By layer->rounding and layer->tile; T, E and K of the layer. */
double tile_waste(const smoe_layer *layer);

#endif
