/* The share of rows that a GEMM with row tiles of 128 rows computes in vain, because every expert's count is
 * padded to a multiple of the tile. Under random routing (K distinct experts of E for each token, all equally
 * likely) an expert's count c is Binomial(T, K/E). So the expectation is exact: waste = E[pad(c) - c] /
 * E[pad(c)].
 *
 * With rounding the count is m, the multiple of the rule's tile that it picks. For NR_F, UP and DOWN m
 * depends on c alone. SR_F picks hi with probability (c - lo)/M. For BALANCE_F and NR_S m depends on more
 * than c; they are approximated by SR_F and NR_F. */
#ifndef CLI_TILE_WASTE_H
#define CLI_TILE_WASTE_H

#include <smoe.h>

enum { GEMM_ROW_TILE = 128 };

/* By layer->rounding and layer->tile; T, E and K of the layer. */
double tile_waste(const smoe_layer *layer);

#endif
