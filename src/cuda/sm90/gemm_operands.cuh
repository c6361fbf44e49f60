// The operands of the cores in gemm_cooperative_rows.cuh, gemm_ping_pong.cuh and gemm_stationary.cuh, chosen
// by the type P of the kernel's parameters. A step of the GEMM covers 64 elements of its K dimension. For one
// step this file loads 64 columns of a box of rows, and the same 64 of the weights of COLUMNS result columns.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// P has lists, y (the tensor map of the result's column chunk) and columns. With HAS_BIAS it also has bias,
// hidden and first_column.
#pragma once
#include "schedule/scheduler.h"
#include "sm90/wgmma.cuh"
#include "tma/tma.cuh"

namespace moe
{

//   WEIGHTS: their order in shared memory; HAS_BIAS; STEP: columns of K in a step
//   LOW_RANK: with LoRA, for the cooperative core alone
//   steps(p): of K;  prefetch(p): its tensor maps
//   load_rows(p, to, full, k, tile);  load_weights<COLUMNS>(p, to, full, k, tile, column)
//   piece(p, i): entry i of the list of pieces, for gemm_stationary.cuh
template <class P> struct operands;

} // namespace moe
