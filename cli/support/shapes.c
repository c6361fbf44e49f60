/* See shapes.h. shapes_table.inc is made from docs/shapes.csv at configure time: one initialiser a line. */
#include "cli/support/shapes.h"

static const bench_shape all_shapes[] = {
#include "shapes_table.inc"
};

const bench_shape *shapes_all(int *count)
{
    *count = (int)(sizeof all_shapes / sizeof all_shapes[0]);
    return all_shapes;
}
