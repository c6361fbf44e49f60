/* Work recorded once and launched as one: CUDA graphs. */
#ifndef CLI_CUDA_GRAPH_H
#define CLI_CUDA_GRAPH_H

#ifdef SMOE_HAVE_CUDA
#include <stdbool.h>

/* Between begin and end what is put on the stream is recorded, not run. */
bool cuda_graph_begin(void *stream);
void *cuda_graph_end(void *stream); // NULL when it could not be recorded

bool cuda_graph_launch(void *graph, void *stream);
void cuda_graph_free(void *graph); // NULL is fine

#endif
#endif
