/* See host.h. */
#include "harness/host.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static bool read_number(const char *path, uint64_t *number)
{
    FILE *file = fopen(path, "r");
    if (!file) return false;
    const bool good = fscanf(file, "%" SCNu64, number) == 1; // "max" is no number: no limit
    fclose(file);
    return good;
}

/* The number after `key` at the start of a line; false when there is none. */
static bool read_entry(const char *path, const char *key, uint64_t *number)
{
    FILE *file = fopen(path, "r");
    if (!file) return false;
    char line[128], found[64];
    bool good = false;
    while (!good && fgets(line, sizeof line, file))
        good = sscanf(line, "%63s %" SCNu64, found, number) == 2 && strcmp(found, key) == 0;
    fclose(file);
    return good;
}

uint64_t host_available_bytes(void)
{
    uint64_t available = UINT64_MAX, kib, limit, used, cache;
    if (read_entry("/proc/meminfo", "MemAvailable:", &kib)) available = kib * 1024;
    if (read_number("/sys/fs/cgroup/memory.max", &limit) &&
        read_number("/sys/fs/cgroup/memory.current", &used)) {
        if (read_entry("/sys/fs/cgroup/memory.stat", "inactive_file", &cache) && cache < used) used -= cache;
        const uint64_t left = limit > used ? limit - used : 0;
        if (left < available) available = left;
    }
    return available;
}

void host_name(char *text, size_t size, int threads)
{
    char line[256], model[128] = "unknown processor";
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "model name : %127[^\n]", model) == 1) break;
    if (file) fclose(file);
    snprintf(text, size, "%s, %d threads", model, threads);
}
