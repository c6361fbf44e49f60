/* round: picks lo or hi as the count of every expert, then adds or drops tokens to reach this count. The
 * tokens of an expert are ranked: selected tokens come first, then higher keys, then lower tokens. Rounding
 * down drops the last selected tokens; rounding up adds the first unselected ones.
 *
 * The n best candidates of an expert are found without sorting. Three counting passes over 11, 11 and 10 bits
 * of the key give the n-th largest key, and how many tokens with exactly this key are among the n best. This
 * takes O(T) for each expert. */
#include "routing.h"

typedef struct round_call {
    const moe_problem *problem;
    const moe_routing_scratch s;
    uint64_t step;
} round_call;

/* One expert: its keys (T) and its bits. Four words hold a panel's bits. */
typedef struct score_column {
    const uint32_t *keys;
    uint64_t *words;
    int64_t word_stride; /* between panels */
    int64_t tokens;
} score_column;

/* The n best candidates are those with a key above `key`, and the first `ties` with exactly this key. */
typedef struct rank_cut {
    uint32_t key;
    int64_t ties;
} rank_cut;

enum { DIGIT_BINS = 2048 };

static score_column column_of(const round_call *c, int64_t expert)
{
    const int64_t experts = c->problem->layer.experts;
    return (score_column){c->s.keys + expert * c->s.key_stride, moe_mask_words(&c->s, 0, expert, experts),
                          experts * MOE_PANEL_WORDS, c->problem->layer.tokens};
}

static uint64_t *word_at(const score_column *column, int64_t first_token)
{
    return column->words + first_token / MOE_TOKEN_PANEL * column->word_stride +
           first_token % MOE_TOKEN_PANEL / 64;
}

/* The number of tokens that top-K selected. */
static int64_t count_tokens(const score_column *column)
{
    int64_t count = 0;
    for (int64_t first = 0; first < column->tokens; first += 64)
        count += __builtin_popcountll(*word_at(column, first));
    return count;
}

/* The candidates among tokens first..first+63 as bits. Candidates are the selected tokens, or the unselected
 * ones. */
static uint64_t candidates_at(const score_column *column, int64_t first, int selected)
{
    const uint64_t word = *word_at(column, first);
    const uint64_t present =
        column->tokens - first < 64 ? (UINT64_C(1) << (column->tokens - first)) - 1 : ~UINT64_C(0);
    return (selected ? word : ~word) & present;
}

/* One digit of cut_after. Looks at the candidates whose key agrees with `prefix` above bit shift + bits.
 * Finds the digit of the *rank-th largest of them, and subtracts from *rank the number of candidates with a
 * higher digit. */
static uint32_t find_digit(const score_column *column, int selected, uint32_t prefix, int shift, int bits,
                           int64_t *rank)
{
    int32_t counts[DIGIT_BINS] = {0};
    const uint32_t digit_mask = (UINT32_C(1) << bits) - 1;
    for (int64_t first = 0; first < column->tokens; first += 64) {
        uint64_t word = candidates_at(column, first, selected);
        while (word) {
            const uint32_t key = column->keys[first + moe_next_bit(&word)];
            if ((uint64_t)(key ^ prefix) >> (shift + bits) == 0) counts[key >> shift & digit_mask]++;
        }
    }
    uint32_t digit = digit_mask;
    for (; digit > 0 && counts[digit] < *rank; digit--) *rank -= counts[digit];
    return digit;
}

/* The cut that contains exactly the n best candidates. There are at least n candidates. */
static rank_cut cut_after(const score_column *column, int selected, int64_t n)
{
    if (n == 0) return (rank_cut){UINT32_MAX, 0};
    uint32_t key = find_digit(column, selected, 0, 21, 11, &n) << 21;
    key |= find_digit(column, selected, key, 10, 11, &n) << 10;
    key |= find_digit(column, selected, key, 0, 10, &n);
    return (rank_cut){key, n};
}

/* The tokens of `word` (tokens first..first+63) that are inside the cut. The ties among them are subtracted
 * from cut->ties. */
static uint64_t within_cut(const score_column *column, int64_t first, uint64_t word, rank_cut *cut)
{
    uint64_t in = 0;
    while (word) {
        const int bit = moe_next_bit(&word);
        const uint32_t key = column->keys[first + bit];
        if (key > cut->key || (key == cut->key && cut->ties-- > 0)) in |= UINT64_C(1) << bit;
    }
    return in;
}

/* Keeps the `target` best of `count` selected tokens, or adds the best unselected tokens until there are
 * `target`. */
static void move_count(const score_column *column, int64_t count, int64_t target)
{
    if (target == count) return;
    const int drops = target < count;
    const int64_t n = drops ? target : target - count;
    rank_cut limit = cut_after(column, drops, n);
    for (int64_t first = 0; first < column->tokens; first += 64) {
        const uint64_t in = within_cut(column, first, candidates_at(column, first, drops), &limit);
        uint64_t *word = word_at(column, first);
        *word = drops ? in : *word | in;
    }
}

/* The sum, in fixed point, of the scores of the n best candidates or of the other candidates. */
static int64_t score_of(const score_column *column, int selected, int64_t n, int best)
{
    rank_cut limit = cut_after(column, selected, n);
    int64_t sum = 0;
    for (int64_t first = 0; first < column->tokens; first += 64) {
        const uint64_t candidates = candidates_at(column, first, selected);
        const uint64_t in = within_cut(column, first, candidates, &limit);
        uint64_t word = best ? in : candidates & ~in;
        while (word) sum += moe_score_fixed(column->keys[first + moe_next_bit(&word)]);
    }
    return sum;
}

static int nr_s_picks_hi(const round_call *c, int64_t expert, int64_t count, int64_t lo, int64_t hi)
{
    const score_column column = column_of(c, expert);
    return moe_nr_s_picks_hi(score_of(&column, 0, hi - count, 1), score_of(&column, 1, lo, 0));
}

static int64_t target_of(const round_call *c, int64_t expert, int64_t count, int64_t residual)
{
    const smoe_layer *l = &c->problem->layer;
    const int64_t tile = l->tile;
    const int64_t lo = moe_round_lo(count, tile), hi = moe_round_hi(count, tile, l->tokens);
    int picks_hi = 0;
    if (hi == lo) return lo;
    switch (l->rounding) {
    case SMOE_ROUNDING_NONE: return count;
    case SMOE_ROUNDING_NR_F: picks_hi = moe_nr_f_picks_hi(count, lo, tile); break;
    case SMOE_ROUNDING_SR_F:
        picks_hi = moe_sr_f_picks_hi(count, lo, tile, moe_round_draw(l->seed, c->step, expert));
        break;
    case SMOE_ROUNDING_NR_S: picks_hi = nr_s_picks_hi(c, expert, count, lo, hi); break;
    case SMOE_ROUNDING_BALANCE_F: picks_hi = moe_balance_f_picks_hi(count, lo, tile, residual); break;
    case SMOE_ROUNDING_UP: picks_hi = 1; break;
    case SMOE_ROUNDING_DOWN: break;
    }
    return picks_hi ? hi : lo;
}

/* BALANCE_F carries a residual from expert to expert; all other rules decide each expert by itself. */
static void balance_targets(const round_call *c)
{
    int64_t residual = 0;
    for (int64_t e = 0; e < c->problem->layer.experts; e++) {
        const score_column column = column_of(c, e);
        const int64_t count = count_tokens(&column), target = target_of(c, e, count, residual);
        residual += count - target;
        c->s.targets[e] = (int32_t)target;
    }
}

smoe_status moe_cpu_round(smoe_context *context, const moe_problem *problem, const smoe_forward_args *args,
                          const moe_plan_arrays *plan, void *scratch, void *stream)
{
    (void)plan;
    const round_call call = {problem, moe_routing_scratch_at(context, problem, scratch), args->step};
    const int balance = problem->layer.rounding == SMOE_ROUNDING_BALANCE_F;
    moe_stage_begin(context, SMOE_STAGE_ROUND, stream);
    if (balance) balance_targets(&call);
#pragma omp parallel for schedule(dynamic) num_threads(context->threads)
    for (int64_t e = 0; e < problem->layer.experts; e++) {
        const score_column column = column_of(&call, e);
        const int64_t count = count_tokens(&column);
        move_count(&column, count, balance ? call.s.targets[e] : target_of(&call, e, count, 0));
    }
    moe_stage_end(context, SMOE_STAGE_ROUND, stream);
    return SMOE_OK;
}
