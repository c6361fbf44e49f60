// What the two cores of gemm_tiles.cuh and gemm_ping_pong.cuh multiply, by the type of their parameters P:
//   rows of 64 elements of K, 128 at a time, and weights of COLUMNS columns, for step k of K.
// P has lists, y (the map of the result's chunk) and columns; with HAS_BIAS also bias, hidden and
// first_column.
#pragma once
#include "host/scheduler.h"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace moe
{

//   WEIGHTS: their order in shared memory; HAS_BIAS; STEP: columns of K a step
//   steps(p): of K;  prefetch(p): its tensor maps
//   load_rows(p, to, full, k, tile);  load_weights<COLUMNS>(p, to, full, k, tile, column)
template <class P> struct operands;

} // namespace moe
