/* See validation_plan.h. */
#include "train/run/validation_plan.h"

#include <math.h>

/* `most` if the budget allows a validation on so many tokens, or on the whole text; else whole windows. */
static int64_t limit(double budget, int64_t most, int64_t text, int64_t context)
{
    const int64_t needed = most < text ? most : text;
    if ((double)needed <= budget) return most;
    const int64_t windows = (int64_t)(budget / (double)context);
    return windows > 1 ? windows * context : context;
}

validation_plan validation_plan_choose(validation_plan wanted, double budget, int64_t text, int64_t context)
{
    enum { MOST = 10, MOST_TOKENS = 16384, MOST_LAST = 1 << 20, LEAST_TOKENS = 2048 };
    validation_plan plan = wanted;
    if (plan.last == 0) plan.last = limit(budget / 2, MOST_LAST, text, context);
    const double left = fmax(budget - (double)(plan.last < text ? plan.last : text), 0.0);
    const int64_t others = wanted.count < 0 ? MOST - 1 : wanted.count - 1;
    double each = others > 0 ? left / (double)others : 0.0;
    if (wanted.count < 0) each = fmax(each, LEAST_TOKENS); // rather fewer validations than smaller ones
    if (plan.tokens == 0) plan.tokens = limit(each, MOST_TOKENS, text, context);
    if (wanted.count < 0) {
        const int64_t size = plan.tokens < text ? plan.tokens : text;
        plan.count = 1 + (int64_t)fmin(left / (double)size, (double)(MOST - 1));
    }
    return plan;
}
