/* The text of statuses and stages. */
#include <smoe.h>

int smoe_version(void)
{
    return SMOE_VERSION;
}

const char *smoe_status_string(smoe_status status)
{
    switch (status) {
    case SMOE_OK: return "ok";
    case SMOE_ERROR_ARGUMENT: return "invalid argument";
    case SMOE_ERROR_SHAPE: return "invalid shape";
    case SMOE_ERROR_ALIGNMENT: return "misaligned pointer";
    case SMOE_ERROR_BUFFER: return "buffer too small";
    case SMOE_ERROR_UNSUPPORTED: return "not supported";
    case SMOE_ERROR_MEMORY: return "out of memory";
    case SMOE_ERROR_DEVICE: return "device error";
    case SMOE_ERROR_PEER: return "another rank failed";
    }
    return "unknown status";
}

const char *smoe_stage_string(smoe_stage stage)
{
    switch (stage) {
    case SMOE_STAGE_ROUTER_GEMM: return "router_gemm";
    case SMOE_STAGE_TOPK: return "topk";
    case SMOE_STAGE_ROUND: return "round";
    case SMOE_STAGE_PLAN: return "plan";
    case SMOE_STAGE_UP: return "up";
    case SMOE_STAGE_DOWN: return "down";
    case SMOE_STAGE_COMBINE: return "combine";
    case SMOE_STAGE_DH: return "dh";
    case SMOE_STAGE_DW2: return "dw2";
    case SMOE_STAGE_DX_ROWS: return "dx_rows";
    case SMOE_STAGE_DW1: return "dw1";
    case SMOE_STAGE_DX: return "dx";
    case SMOE_STAGE_ROUTER_BWD: return "router_bwd";
    case SMOE_STAGE_DISPATCH: return "dispatch";
    case SMOE_STAGE_COLLECT: return "collect";
    case SMOE_STAGE_DISPATCH_BWD: return "dispatch_bwd";
    case SMOE_STAGE_COLLECT_BWD: return "collect_bwd";
    }
    return "unknown stage";
}
