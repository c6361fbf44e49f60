/* Work recorded once and launched as one: CUDA graphs. What was recorded can be counted, and each part of it
 * (a kernel; a fill or copy if there were any) launched by itself. */
#ifndef CLI_CUDA_GRAPH_H
#define CLI_CUDA_GRAPH_H

#ifdef SMOE_HAVE_CUDA
#include <stdbool.h>

typedef struct cuda_graph cuda_graph;

/* Between begin and end what is put on the stream is recorded, not run. NULL when recording does not start; a
 * graph whose end is false can only be freed. */
cuda_graph *cuda_graph_begin(void *stream);
bool cuda_graph_end(cuda_graph *recorded, void *stream);

/* While recording: the launches since the last mark belong to `stage`, a number of the caller's. */
void cuda_graph_mark(cuda_graph *recording, int stage);

bool cuda_graph_launch(const cuda_graph *graph, void *stream);
void cuda_graph_free(cuda_graph *freed); // NULL is fine

/* Kernels and other launches in a recorded graph, in their order, and the stage each was marked with (-1:
 * none). 0 when they are not known. */
int cuda_graph_launches(const cuda_graph *recorded);
int cuda_graph_stage(const cuda_graph *recorded, int launch);

/* Graphs of a part of a recorded one: what comes before a launch, and the launch alone, `times` times one
 * after the other. NULL when they cannot be made. */
cuda_graph *cuda_graph_before(const cuda_graph *recorded, int launch);
cuda_graph *cuda_graph_alone(const cuda_graph *recorded, int launch, int times);

#endif
#endif
