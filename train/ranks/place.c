/* See place.h. */
#define _GNU_SOURCE 1
#include "train/ranks/place.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_set(const char *name)
{
    const char *text = getenv(name);
    return text && *text;
}

static bool read_number(const char *name, int low, int high, int *value, error *err)
{
    const char *text = getenv(name);
    char *end;
    if (!text)
        return fail(err, ERROR_USAGE, "the environment has no %s, which its other variables ask for", name);
    const long number = strtol(text, &end, 10);
    *value = (int)number;
    return (end != text && !*end && number >= low && number <= high) ||
           fail(err, ERROR_USAGE, "%s is '%.40s', not a number in %d..%d", name, text, low, high);
}

enum { MOST_RANKS = 4096, MOST_PORT = 65535 };

static bool read_ranks(rank_place *p, const char *ranks, const char *rank, const char *local, error *err)
{
    return read_number(ranks, 1, MOST_RANKS, &p->ranks, err) &&
           read_number(rank, 0, p->ranks - 1, &p->rank, err) &&
           read_number(local, 0, MOST_RANKS, &p->local, err);
}

static bool read_address(rank_place *p, const char *name, error *err)
{
    const char *text = getenv(name);
    if (!text || !*text) return fail(err, ERROR_USAGE, "the environment has no %s, the host of rank 0", name);
    if (snprintf(p->address, sizeof p->address, "%s", text) < (int)sizeof p->address) return true;
    return fail(err, ERROR_USAGE, "%s has more than %zu characters", name, sizeof p->address - 1);
}

static bool from_launcher(rank_place *p, error *err)
{
    p->launched = true;
    return read_ranks(p, "SMOE_RANKS", "SMOE_RANK", "SMOE_LOCAL_RANK", err) &&
           read_address(p, "SMOE_ADDRESS", err) && read_number("SMOE_PORT", 1, MOST_PORT, &p->port, err) &&
           read_number("SMOE_VOICE", 0, 1 << 20, &p->voice, err) &&
           (p->rank > 0 || read_number("SMOE_LISTENER", 0, 1 << 20, &p->listener, err));
}

/* torchrun's agent listens on MASTER_PORT itself; the next port is then ours. */
static bool from_torchrun(rank_place *p, error *err)
{
    const char *taken = getenv("TORCHELASTIC_USE_AGENT_STORE");
    if (!read_ranks(p, "WORLD_SIZE", "RANK", "LOCAL_RANK", err) || !read_address(p, "MASTER_ADDR", err) ||
        !read_number("MASTER_PORT", 1, MOST_PORT - 1, &p->port, err))
        return false;
    if (taken && strcmp(taken, "True") == 0) p->port++;
    return true;
}

/* The first host of a list such as gpu[03-07,09],login. */
static bool first_host(rank_place *p, const char *list, error *err)
{
    const size_t plain = strcspn(list, "[,");
    size_t inside = 0;
    if (list[plain] == '[') inside = strcspn(list + plain + 1, "-,]");
    const int length = snprintf(p->address, sizeof p->address, "%.*s%.*s", (int)plain, list, (int)inside,
                                list[plain] == '[' ? list + plain + 1 : "");
    return (length > 0 && length < (int)sizeof p->address) ||
           fail(err, ERROR_USAGE, "SLURM_STEP_NODELIST is '%.80s', which names no host", list);
}

/* Without MASTER_PORT: one that follows from the names of a job, so that two runs on one host hardly meet. It
 * is below the ports that systems give to programs which do not ask for one. */
static int port_of(const char *job, const char *step)
{
    char text[256];
    uint32_t hash = 2166136261u;
    snprintf(text, sizeof text, "%s.%s", job ? job : "", step ? step : "");
    for (const char *c = text; *c; c++) hash = (hash ^ (unsigned char)*c) * 16777619u;
    return 20000 + (int)(hash % 10000);
}

static bool from_slurm(rank_place *p, error *err)
{
    const char *hosts = getenv("SLURM_STEP_NODELIST");
    if (!read_ranks(p, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", err)) return false;
    if (is_set("MASTER_ADDR") ? !read_address(p, "MASTER_ADDR", err)
        : hosts               ? !first_host(p, hosts, err)
                              : !read_address(p, "SLURM_STEP_NODELIST", err))
        return false;
    p->port = port_of(getenv("SLURM_JOB_ID"), getenv("SLURM_STEP_ID"));
    return !is_set("MASTER_PORT") || read_number("MASTER_PORT", 1, MOST_PORT, &p->port, err);
}

static bool from_open_mpi(rank_place *p, error *err)
{
    int here = 0;
    if (!read_ranks(p, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", err))
        return false;
    const bool one_host = is_set("OMPI_COMM_WORLD_LOCAL_SIZE") &&
                          read_number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, MOST_RANKS, &here, NULL) &&
                          here == p->ranks;
    p->port = port_of(getenv("PMIX_NAMESPACE"), NULL);
    snprintf(p->address, sizeof p->address, "127.0.0.1");
    if ((!one_host || is_set("MASTER_ADDR")) && !read_address(p, "MASTER_ADDR", err)) return false;
    return !is_set("MASTER_PORT") || read_number("MASTER_PORT", 1, MOST_PORT, &p->port, err);
}

bool rank_place_read(rank_place *p, error *err)
{
    *p = (rank_place){.ranks = 1, .listener = -1};
    if (is_set("SMOE_RANK")) return from_launcher(p, err);
    if (is_set("RANK") || is_set("WORLD_SIZE")) return from_torchrun(p, err);
    if (is_set("SLURM_STEP_NUM_TASKS")) return from_slurm(p, err);
    if (is_set("OMPI_COMM_WORLD_SIZE")) return from_open_mpi(p, err);
    return true;
}
