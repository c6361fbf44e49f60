/* The names, shapes and types of the slots. */
#include "harness/slots.h"

#include "oracle/number.h"

static const char *const slot_names[SLOTS] = {"x",
                                              "router_weight",
                                              "router_bias",
                                              "logits",
                                              "selection_bias",
                                              "losses",
                                              "topk_ids",
                                              "topk_weights",
                                              "offsets",
                                              "row_weights",
                                              "w1",
                                              "b1",
                                              "w2",
                                              "b2",
                                              "weights_f8",
                                              "out",
                                              "saved",
                                              "scratch (forward)",
                                              "token_mask",
                                              "scratch (backward)",
                                              "dout",
                                              "dx",
                                              "dw1",
                                              "dw2",
                                              "db1",
                                              "db2",
                                              "drouter_weight",
                                              "drouter_bias",
                                              "dlogits",
                                              "dtopk_weights",
                                              "drow_weights",
                                              "loss_gradients"};

const char *slot_name(slot_id id)
{
    return slot_names[id];
}

extent slot_extent(const run *r, slot_id id)
{
    const smoe_layer *l = &r->layer;
    const int64_t td = l->tokens * l->hidden, te = l->tokens * l->experts, tk = l->tokens * l->topk;
    const int64_t e = l->experts, ed = e * l->hidden, width = oracle_h_width(l);
    const int64_t rows = l->entry == SMOE_ENTRY_FROM_LOGITS ? r->sizes.padded_rows : l->tokens;
    switch (id) {
    case SLOT_X:
    case SLOT_OUT:
    case SLOT_DOUT:
    case SLOT_DX: return (extent){td, l->dtype, false};
    case SLOT_ROUTER_WEIGHT: return (extent){ed, l->dtype, false};
    case SLOT_ROUTER_BIAS: return (extent){e, l->dtype, false};
    case SLOT_LOGITS:
    case SLOT_DLOGITS: return (extent){te, l->logits_type, false};
    case SLOT_SELECTION_BIAS: return (extent){e, SMOE_TYPE_F32, false};
    case SLOT_LOSS_GRADIENTS:
    case SLOT_LOSSES: return (extent){2, SMOE_TYPE_F32, false};
    case SLOT_TOPK_IDS: return (extent){tk, l->index_type, false};
    case SLOT_TOPK_WEIGHTS:
    case SLOT_DTOPK_WEIGHTS: return (extent){tk, SMOE_TYPE_F32, false};
    case SLOT_OFFSETS: return (extent){e + 1, l->index_type, false};
    case SLOT_ROW_WEIGHTS: return (extent){l->tokens, SMOE_TYPE_F32, false};
    case SLOT_DROW_WEIGHTS: return (extent){rows, SMOE_TYPE_F32, false};
    case SLOT_W1: return (extent){ed * width, l->dtype, false};
    case SLOT_B1: return (extent){e * width, l->dtype, false};
    case SLOT_W2: return (extent){ed * l->intermediate, l->dtype, false};
    case SLOT_B2: return (extent){ed, l->dtype, false};
    case SLOT_WEIGHTS_F8: return (extent){(int64_t)r->sizes.weights_f8_bytes, SMOE_TYPE_F32, true};
    case SLOT_DW1: return (extent){ed * width, l->gradient_type, false};
    case SLOT_DB1: return (extent){e * width, l->gradient_type, false};
    case SLOT_DW2: return (extent){ed * l->intermediate, l->gradient_type, false};
    case SLOT_DB2:
    case SLOT_DROUTER_WEIGHT: return (extent){ed, l->gradient_type, false};
    case SLOT_DROUTER_BIAS: return (extent){e, l->gradient_type, false};
    case SLOT_SAVED: return (extent){(int64_t)r->sizes.saved_buffer_bytes, SMOE_TYPE_F32, true};
    case SLOT_SCRATCH_FORWARD: return (extent){(int64_t)r->sizes.scratch_forward_bytes, SMOE_TYPE_F32, true};
    case SLOT_TOKEN_MASK: return (extent){l->tokens, SMOE_TYPE_F32, true};
    case SLOT_SCRATCH_BACKWARD:
        return (extent){(int64_t)r->sizes.scratch_backward_bytes, SMOE_TYPE_F32, true};
    case SLOTS: break;
    }
    return (extent){0, SMOE_TYPE_F32, true};
}

uint64_t slot_bytes(const run *r, slot_id id)
{
    const extent x = slot_extent(r, id);
    return r->wanted[id] ? (uint64_t)x.count * (x.bytes ? 1 : oracle_type_bytes(x.type)) : 0;
}
