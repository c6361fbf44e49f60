/* Which of several ranks this process is, and where rank 0 is found. */
#ifndef TRAIN_PLACE_H
#define TRAIN_PLACE_H

#include "base/error.h"

typedef struct rank_place {
    int rank, ranks;   // 1: there are no others
    int local;         // among the ranks of this host: the number of its GPU
    char address[256]; // of rank 0
    int port;          // on which it listens
    int listener;      // rank 0 under `smoe train --gpus`: a socket that listens already; else -1
    bool launched;     // by `smoe train --gpus`, which says how a rank ended that could not say it itself
    int voice;         // then: an eventfd with the value 1, for the rank that writes the one message
} rank_place;

/* Reads the environment: of `smoe train --gpus` (SMOE_RANK), torchrun (RANK), srun (SLURM_STEP_NUM_TASKS) or
 * Open MPI (OMPI_COMM_WORLD_SIZE), in this order. Without any: one rank. Errors name the variable. */
bool rank_place_read(rank_place *p, error *err);

#endif
