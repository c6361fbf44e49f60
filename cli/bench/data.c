/* See data.h. Every row of every tensor has a random stream of its own, seeded by its number, so rows
 * can be made by any thread in any order. */
#include "cli/bench/data.h"

#include "oracle/number.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { STAGING_VALUES = 1 << 20 }; // doubles made at a time

static oracle_random stream_of(uint64_t seed, int64_t row)
{
    oracle_random stream = {seed * UINT64_C(0x9e3779b97f4a7c15) +
                            (uint64_t)row * UINT64_C(0xd1b54a32d192ed03)};
    stream.state = oracle_random_bits(&stream);
    return stream;
}

/* Makes rows [first, first + rows) of a tensor as doubles, in `values`. */
typedef void make_row(const void *user, int64_t row, double *values);

/* Rows of `width` values made by `make`, rounded to the type and sent, a staging buffer at a time. */
static bool fill_rows(const buffer *to, smoe_type type, int64_t rows, int64_t width, make_row *make,
                      const void *user)
{
    const int64_t at_once = width < STAGING_VALUES ? STAGING_VALUES / width : 1;
    const size_t element = oracle_type_bytes(type);
    double *values = malloc((size_t)(at_once * width) * sizeof *values);
    char *staged = malloc((size_t)(at_once * width) * element);
    bool good = values && staged;
    for (int64_t first = 0; good && first < rows; first += at_once) {
        const int64_t count = rows - first < at_once ? rows - first : at_once;
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < count; i++) {
            make(user, first + i, values + i * width);
            oracle_store(staged + (size_t)(i * width) * element, type, values + i * width, (size_t)width);
        }
        good = to->device->upload((char *)to->data + (size_t)(first * width) * element, staged,
                                  (size_t)(count * width) * element);
    }
    free(values);
    free(staged);
    return good;
}

/* Values of one stream; the tail of a tensor may be narrower, so rows are short. */
enum { NORMAL_ROW = 1024 };

typedef struct normal_user {
    uint64_t seed;
    double scale;
    int64_t width;
} normal_user;

static void make_normal(const void *user, int64_t row, double *values)
{
    const normal_user *normal = user;
    oracle_random stream = stream_of(normal->seed, row);
    for (int64_t i = 0; i < normal->width; i++) values[i] = normal->scale * oracle_random_normal(&stream);
}

bool fill_normal(const buffer *to, smoe_type type, int64_t count, double scale, uint64_t seed)
{
    const int64_t rows = count / NORMAL_ROW, rest = count % NORMAL_ROW;
    const normal_user body = {seed, scale, NORMAL_ROW}, tail = {seed + 1, scale, rest};
    if (!fill_rows(to, type, rows, NORMAL_ROW, make_normal, &body)) return false;
    if (rest == 0) return true;
    buffer end = *to;
    end.data = (char *)to->data + (size_t)(rows * NORMAL_ROW) * oracle_type_bytes(type);
    return fill_rows(&end, type, 1, rest, make_normal, &tail);
}

/* From one start to the next, modulo the length of the pattern. About the golden section of that length, so
 * that successive starts are far apart. An odd multiple of 128, so that every multiple of 128 is a start
 * before one is repeated. */
enum { TILED_STEP = 20251 * 128 };

bool fill_tiled(const buffer *to, smoe_type type, int64_t count, double scale, uint64_t seed)
{
    const size_t element = oracle_type_bytes(type);
    char *values = to->data;
    if (!fill_normal(to, type, count < TILED_VALUES ? count : TILED_VALUES, scale, seed)) return false;
    int64_t from = TILED_STEP;
    bool good = true;
    for (int64_t done = TILED_VALUES, run; good && done < count; done += run) {
        run = TILED_VALUES - from < count - done ? TILED_VALUES - from : count - done;
        good = to->device->copy(values + (size_t)done * element, values + (size_t)from * element,
                                (size_t)run * element);
        from = (from + TILED_STEP) % TILED_VALUES;
    }
    return good;
}

/* ---- Routing ---- */

static bool among(const int32_t *ids, int64_t count, int32_t id)
{
    for (int64_t i = 0; i < count; i++)
        if (ids[i] == id) return true;
    return false;
}

static void swap(int32_t *a, int32_t *b)
{
    const int32_t kept = *a;
    *a = *b;
    *b = kept;
}

static void shuffle(int32_t *ids, int64_t count, oracle_random *random)
{
    for (int64_t i = count - 1; i > 0; i--) swap(&ids[i], &ids[oracle_random_integer(random, 0, i)]);
}

/* Takes the experts in a random order, which is drawn again when all have been taken, so that counts differ
 * by one at most. An expert that the token already has is moved further down in the order. */
static void deal_uniform(int64_t tokens, int64_t experts, int64_t topk, oracle_random *random, int32_t *deck,
                         int32_t *ids)
{
    int64_t next = experts;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t k = 0; k < topk; k++) {
            int32_t *held = ids + t * topk;
            if (next == experts) {
                shuffle(deck, experts, random);
                next = 0;
            }
            int64_t other = next;
            while (among(held, k, deck[other])) other++;
            swap(&deck[next], &deck[other]);
            held[k] = deck[next++];
        }
}

static void draw_random(int64_t experts, int64_t topk, oracle_random *random, int32_t *deck, int32_t *held)
{
    for (int64_t k = 0; k < topk; k++) {
        swap(&deck[k], &deck[oracle_random_integer(random, k, experts - 1)]);
        held[k] = deck[k];
    }
}

/* K draws without replacement by the weights 1 / (rank + 1) of the ranks in `deck`: a draw is made again when
 * its expert is held already. */
static void draw_skewed(int64_t experts, int64_t topk, oracle_random *random, const int32_t *deck,
                        const double *cumulated, int32_t *held)
{
    for (int64_t k = 0; k < topk;) {
        const double at = oracle_random_uniform(random) * cumulated[experts - 1];
        int64_t low = 0, high = experts - 1;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (cumulated[middle] > at)
                high = middle;
            else
                low = middle + 1;
        }
        if (!among(held, k, deck[low])) held[k++] = deck[low];
    }
}

bool make_routing(routing_kind kind, int64_t tokens, int64_t experts, int64_t topk, uint64_t seed,
                  int32_t *ids)
{
    int32_t *deck = malloc((size_t)experts * sizeof *deck);
    double *cumulated = malloc((size_t)experts * sizeof *cumulated);
    const bool good = deck && cumulated;
    if (good) {
        oracle_random random = stream_of(seed, -1);
        double sum = 0;
        for (int64_t e = 0; e < experts; e++) {
            deck[e] = (int32_t)e;
            cumulated[e] = sum += 1.0 / (double)(e + 1);
        }
        shuffle(deck, experts, &random);
        if (kind == ROUTING_UNIFORM) deal_uniform(tokens, experts, topk, &random, deck, ids);
        for (int64_t t = 0; kind != ROUTING_UNIFORM && t < tokens; t++) {
            if (kind == ROUTING_RANDOM)
                draw_random(experts, topk, &random, deck, ids + t * topk);
            else
                draw_skewed(experts, topk, &random, deck, cumulated, ids + t * topk);
        }
    }
    free(deck);
    free(cumulated);
    return good;
}

/* ---- Inputs that lead to a routing ---- */

typedef struct steer_user {
    const smoe_layer *layer;
    const int32_t *ids;
    uint64_t seed;
    smoe_type type;  // of the values as stored
    int64_t width;   // values of a row
    int64_t columns; // from one expert's value to the next
} steer_user;

/* Swaps values until the chosen experts have the K largest, then lowers what ties with the least of them. */
static void steer(const steer_user *user, int64_t token, double *values)
{
    const int64_t experts = user->layer->experts, topk = user->layer->topk;
    const int32_t *ids = user->ids + token * topk;
    double least = INFINITY;
    for (int64_t k = 0; k < topk; k++) { // the largest among all but the experts already served
        int64_t best = ids[k];
        for (int64_t e = 0; e < experts; e++)
            if (values[e * user->columns] > values[best * user->columns] && !among(ids, k, (int32_t)e))
                best = e;
        const double kept = values[best * user->columns];
        values[best * user->columns] = values[ids[k] * user->columns];
        values[ids[k] * user->columns] = least = kept;
    }
    for (int64_t e = 0; e < experts; e++) {
        double *value = &values[e * user->columns];
        for (double step = 0.01; *value >= least && !among(ids, topk, (int32_t)e); step *= 2)
            *value = oracle_round_to(least - step * (fabs(least) + 0.01), user->type);
    }
}

static void make_steered(const void *given, int64_t row, double *values)
{
    const steer_user *user = given;
    oracle_random stream = stream_of(user->seed, row);
    for (int64_t i = 0; i < user->width; i++)
        values[i] = oracle_round_to(oracle_random_normal(&stream), user->type);
    steer(user, row, values);
}

static int64_t router_columns(const smoe_layer *layer)
{
    return layer->hidden / layer->experts;
}

bool fill_steered(const buffer *x, const smoe_layer *layer, const int32_t *ids, uint64_t seed)
{
    const steer_user user = {layer, ids, seed, layer->dtype, layer->hidden, router_columns(layer)};
    return fill_rows(x, layer->dtype, layer->tokens, layer->hidden, make_steered, &user);
}

bool fill_logits(const buffer *logits, const smoe_layer *layer, const int32_t *ids, uint64_t seed)
{
    const steer_user user = {layer, ids, seed, layer->logits_type, layer->experts, 1};
    return fill_rows(logits, layer->logits_type, layer->tokens, layer->experts, make_steered, &user);
}

static void make_router(const void *given, int64_t row, double *values)
{
    const smoe_layer *layer = given;
    memset(values, 0, (size_t)layer->hidden * sizeof *values);
    values[row * router_columns(layer)] = 1;
}

bool fill_router(const buffer *router_weight, const smoe_layer *layer)
{
    return fill_rows(router_weight, layer->dtype, layer->experts, layer->hidden, make_router, layer);
}

static void make_weights(const void *given, int64_t row, double *values)
{
    const steer_user *user = given;
    oracle_random stream = stream_of(user->seed, row);
    double sum = 0;
    for (int64_t k = 0; k < user->width; k++) sum += values[k] = 0.5 + oracle_random_uniform(&stream);
    for (int64_t k = 0; k < user->width; k++) values[k] /= sum;
}

bool fill_weights(const buffer *weights, const smoe_layer *layer, uint64_t seed)
{
    const steer_user user = {.seed = seed, .width = layer->topk};
    return fill_rows(weights, SMOE_TYPE_F32, layer->tokens, layer->topk, make_weights, &user);
}
