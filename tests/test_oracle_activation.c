/* The oracle's activations: values and derivatives worked out by hand, and by differences. */
#include "oracle/oracle.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

static void assert_close(double got, double want, double limit)
{
    if (!(fabs(got - want) <= limit)) fail_msg("got %.17g, want %.17g within %g", got, want, limit);
}

static smoe_layer with(smoe_activation activation)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.activation = activation;
    return layer;
}

static double value_of(smoe_activation activation, double g, double u)
{
    const smoe_layer layer = with(activation);
    return oracle_activate(&layer, g, u);
}

/* The limits of swiglu_clamped: the slope is zero for a gate above its limit, and for an up value outside of
 * its limits. */
static void clamped_slopes_are_zero(void **state)
{
    (void)state;
    const double edge = 7 / (1 + exp((double)-1.702f * 7));
    smoe_layer layer = with(SMOE_ACTIVATION_SWIGLU_CLAMPED);
    double dg, du;
    assert_close(oracle_activate(&layer, 9, 9), edge * 8, 1e-13);
    assert_close(oracle_activate(&layer, 9, -9), edge * -6, 1e-13);
    oracle_activate_backward(&layer, 9, 1, 1, &dg, &du);
    assert_close(dg, 0, 0);
    assert_close(du, edge, 1e-13);
    oracle_activate_backward(&layer, -9, 9, 1, &dg, &du);
    assert_true(dg != 0);
    assert_close(du, 0, 0);
    oracle_activate_backward(&layer, 1, -9, 1, &dg, &du);
    assert_close(du, 0, 0);
    layer.gate_limit = 2, layer.up_limit = 3, layer.gate_alpha = 1, layer.up_offset = 0;
    assert_close(oracle_activate(&layer, 9, 9), 2 / (1 + exp(-2)) * 3, 1e-13);
    assert_close(oracle_activate(&layer, 1, -9), 1 / (1 + exp(-1)) * -3, 1e-13);
}

/* swiglu_capped by hand, and its derivatives by differences. */
static void capped_values_are_right_by_hand(void **state)
{
    (void)state;
    smoe_layer layer = with(SMOE_ACTIVATION_SWIGLU_CAPPED);
    layer.gate_limit = 4, layer.up_limit = 25, layer.gate_alpha = 1.5f, layer.up_offset = 0.5f;
    const double g = 3, u = -20, h = 1e-5;
    const double want = 4 * tanh(0.75) / (1 + exp(-4.5)) * (25 * tanh(-0.8) + 0.5);
    double dg, du;
    assert_close(oracle_activate(&layer, g, u), want, 1e-13);
    oracle_activate_backward(&layer, g, u, 2, &dg, &du);
    assert_close(dg, (oracle_activate(&layer, g + h, u) - oracle_activate(&layer, g - h, u)) / h, 1e-8);
    assert_close(du, (oracle_activate(&layer, g, u + h) - oracle_activate(&layer, g, u - h)) / h, 1e-8);
}

static void activations_are_right_by_hand(void **state)
{
    (void)state;
    assert_close(value_of(SMOE_ACTIVATION_SWIGLU, 1, 3), 3 / (1 + exp(-1)), 1e-15);
    assert_close(value_of(SMOE_ACTIVATION_GELU, 1, 0), 0.8413447460685429, 1e-15);
    assert_close(value_of(SMOE_ACTIVATION_GEGLU_TANH, 1, 2), 2 * 0.8411919906082768, 1e-15);
    assert_close(value_of(SMOE_ACTIVATION_RELU2, -3, 0), 0, 0);
    assert_close(value_of(SMOE_ACTIVATION_RELU2, 3, 0), 9, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(clamped_slopes_are_zero),
        cmocka_unit_test(capped_values_are_right_by_hand),
        cmocka_unit_test(activations_are_right_by_hand),
    };
    return cmocka_run_group_tests_name("oracle_activation", tests, NULL, NULL);
}
