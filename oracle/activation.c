/* The activations and their derivatives. The switches have no default, so that an enumerator that one of them
 * lacks does not compile. */
#include "oracle/oracle.h"

#include <math.h>

bool oracle_gated(smoe_activation activation)
{
    switch (activation) {
    case SMOE_ACTIVATION_SWIGLU:
    case SMOE_ACTIVATION_GEGLU:
    case SMOE_ACTIVATION_GEGLU_TANH:
    case SMOE_ACTIVATION_REGLU:
    case SMOE_ACTIVATION_SWIGLU_OAI: return true;
    case SMOE_ACTIVATION_SILU:
    case SMOE_ACTIVATION_GELU:
    case SMOE_ACTIVATION_RELU:
    case SMOE_ACTIVATION_RELU2: return false;
    }
    return false;
}

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

/* A function of one variable with its derivative. */
typedef struct curve {
    double value, slope;
} curve;

static curve swish(double x, double beta)
{
    const double s = sigmoid(beta * x);
    return (curve){x * s, s + beta * x * s * (1.0 - s)};
}

static curve gelu(double x)
{
    const double normal_cdf = 0.5 * erfc(-x / sqrt(2.0));
    const double normal_density = exp(-0.5 * x * x) / sqrt(2.0 * acos(-1.0));
    return (curve){x * normal_cdf, normal_cdf + x * normal_density};
}

static curve gelu_tanh(double x)
{
    const double scale = sqrt(2.0 / acos(-1.0));
    const double t = tanh(scale * (x + 0.044715 * x * x * x));
    const double inner = scale * (1.0 + 3.0 * 0.044715 * x * x);
    return (curve){0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner};
}

static curve relu(double x)
{
    if (isnan(x)) return (curve){x, x};
    return x > 0.0 ? (curve){x, 1.0} : (curve){0.0, 0.0};
}

/* The curve that the gate (or the only input) goes through. */
static curve gate_curve(smoe_activation activation, double g)
{
    switch (activation) {
    case SMOE_ACTIVATION_SWIGLU:
    case SMOE_ACTIVATION_SILU: return swish(g, 1.0);
    case SMOE_ACTIVATION_GEGLU:
    case SMOE_ACTIVATION_GELU: return gelu(g);
    case SMOE_ACTIVATION_GEGLU_TANH: return gelu_tanh(g);
    case SMOE_ACTIVATION_REGLU:
    case SMOE_ACTIVATION_RELU: return relu(g);
    case SMOE_ACTIVATION_RELU2: {
        const curve r = relu(g);
        return (curve){r.value * r.value, 2.0 * r.value};
    }
    case SMOE_ACTIVATION_SWIGLU_OAI: {
        if (!(g > 7.0)) return swish(g, 1.702);
        return (curve){swish(7.0, 1.702).value, 0.0};
    }
    }
    return (curve){NAN, NAN};
}

/* What multiplies the gate's curve. */
static curve up_curve(smoe_activation activation, double u)
{
    if (!oracle_gated(activation)) return (curve){1.0, 0.0};
    if (activation != SMOE_ACTIVATION_SWIGLU_OAI) return (curve){u, 1.0};
    if (u > 7.0) return (curve){8.0, 0.0};
    if (u < -7.0) return (curve){-6.0, 0.0};
    return (curve){u + 1.0, 1.0};
}

double oracle_activate(smoe_activation activation, double g, double u)
{
    return gate_curve(activation, g).value * up_curve(activation, u).value;
}

void oracle_activate_backward(smoe_activation activation, double g, double u, double da, double *dg,
                              double *du)
{
    const curve gate = gate_curve(activation, g), up = up_curve(activation, u);
    *dg = da * gate.slope * up.value;
    *du = da * gate.value * up.slope;
}
