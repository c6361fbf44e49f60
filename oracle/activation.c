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
    case SMOE_ACTIVATION_SWIGLU_CLAMPED:
    case SMOE_ACTIVATION_SWIGLU_CAPPED: return true;
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

static curve soft_cap(double x, double limit)
{
    const double t = tanh(x / limit);
    return (curve){limit * t, 1.0 - t * t};
}

/* The curve that the gate (or the only input) goes through. */
static curve gate_curve(const smoe_layer *layer, double g)
{
    switch (layer->activation) {
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
    case SMOE_ACTIVATION_SWIGLU_CLAMPED: {
        if (!(g > layer->gate_limit)) return swish(g, layer->gate_alpha);
        return (curve){swish(layer->gate_limit, layer->gate_alpha).value, 0.0};
    }
    case SMOE_ACTIVATION_SWIGLU_CAPPED: {
        const curve c = soft_cap(g, layer->gate_limit);
        const double s = sigmoid(layer->gate_alpha * g);
        return (curve){c.value * s, c.slope * s + c.value * layer->gate_alpha * s * (1.0 - s)};
    }
    }
    return (curve){NAN, NAN};
}

/* What multiplies the gate's curve. */
static curve up_curve(const smoe_layer *layer, double u)
{
    const double limit = layer->up_limit, offset = layer->up_offset;
    if (!oracle_gated(layer->activation)) return (curve){1.0, 0.0};
    if (layer->activation == SMOE_ACTIVATION_SWIGLU_CAPPED) {
        const curve c = soft_cap(u, limit);
        return (curve){c.value + offset, c.slope};
    }
    if (layer->activation != SMOE_ACTIVATION_SWIGLU_CLAMPED) return (curve){u, 1.0};
    if (u > limit) return (curve){limit + offset, 0.0};
    if (u < -limit) return (curve){offset - limit, 0.0};
    return (curve){u + offset, 1.0};
}

double oracle_activate(const smoe_layer *layer, double g, double u)
{
    return gate_curve(layer, g).value * up_curve(layer, u).value;
}

void oracle_activate_backward(const smoe_layer *layer, double g, double u, double da, double *dg, double *du)
{
    const curve gate = gate_curve(layer, g), up = up_curve(layer, u);
    *dg = da * gate.slope * up.value;
    *du = da * gate.value * up.slope;
}
