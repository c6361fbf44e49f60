/* See launch.h. The parent only waits: it has no thread, no device and no part in the run. */
#define _GNU_SOURCE 1
#include "train/ranks/launch.h"

#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { GRACE_SECONDS = 10, MOST_LAUNCHED = 64 };

typedef struct children {
    pid_t pids[MOST_LAUNCHED]; // 0: has ended
    int status[MOST_LAUNCHED]; // of waitpid
    bool killed[MOST_LAUNCHED];
    int count, running;
    int first; // that ended badly; -1: none
    int voice; // see place.h
} children;

/* A socket that listens on a free port of this host alone. */
static int make_listener(int *port, error *err)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    const int made = socket(AF_INET, SOCK_STREAM, 0);
    if (made >= 0 && bind(made, (struct sockaddr *)&at, size) == 0 && listen(made, MOST_LAUNCHED) == 0 &&
        getsockname(made, (struct sockaddr *)&at, &size) == 0) {
        *port = ntohs(at.sin_port);
        return made;
    }
    fail(err, ERROR_RUNTIME, "the ranks' first one cannot listen: %s", strerror(errno));
    if (made >= 0) close(made);
    return -1;
}

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* In the child: becomes rank `rank`. Returns only if that fails. */
static void become(int rank, int ranks, bool cpus, int port, int listener, int voice, pid_t parent,
                   char **argv)
{
    const long threads = sysconf(_SC_NPROCESSORS_ONLN) / ranks;
    set_number("SMOE_RANK", rank);
    set_number("SMOE_RANKS", ranks);
    set_number("SMOE_LOCAL_RANK", rank);
    setenv("SMOE_ADDRESS", "127.0.0.1", 1);
    set_number("SMOE_PORT", port);
    set_number("SMOE_LISTENER", listener);
    set_number("SMOE_VOICE", voice);
    if (cpus && !getenv("OMP_NUM_THREADS")) set_number("OMP_NUM_THREADS", threads > 1 ? (int)threads : 1);
    if (rank > 0) close(listener);
    (void)prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(ERROR_RUNTIME); // it ended before
    execv("/proc/self/exe", argv);
}

static bool start(children *c, int ranks, bool cpus, char **argv, const sigset_t *mask, error *err)
{
    int port, listener = make_listener(&port, err);
    const pid_t parent = getpid();
    if (listener < 0) return false;
    c->voice = eventfd(1, EFD_NONBLOCK);
    for (int r = 0; r < ranks; r++) {
        const pid_t child = fork();
        if (child == 0) {
            sigprocmask(SIG_SETMASK, mask, NULL);
            become(r, ranks, cpus, port, listener, c->voice, parent, argv);
            _exit(ERROR_RUNTIME);
        }
        if (child < 0) {
            fail(err, ERROR_RUNTIME, "rank %d does not start: %s", r, strerror(errno));
            break;
        }
        c->pids[c->count++] = child;
        c->running++;
    }
    close(listener);
    return c->count == ranks;
}

static void signal_all(children *c, int number)
{
    for (int r = 0; r < c->count; r++) {
        if (!c->pids[r]) continue;
        if (number == SIGKILL) c->killed[r] = true;
        (void)kill(c->pids[r], number);
    }
}

/* Notes the children that have ended. True: one of them with another status than 0. */
static bool reap(children *c)
{
    bool bad = false;
    int status;
    pid_t ended;
    while ((ended = waitpid(-1, &status, WNOHANG)) > 0)
        for (int r = 0; r < c->count; r++) {
            if (c->pids[r] != ended) continue;
            c->pids[r] = 0;
            c->status[r] = status;
            c->running--;
            bad |= status != 0;
            if (status != 0 && c->first < 0) c->first = r;
        }
    return bad;
}

/* Waits for all. After the first that ends badly the others have GRACE_SECONDS. */
static void wait_all(children *c, const sigset_t *signals)
{
    const struct timespec tick = {0, 200000000};
    struct timespec now;
    time_t last = 0;
    while (c->running) {
        const int number = sigtimedwait(signals, NULL, &tick);
        if (number == SIGINT || number == SIGTERM || number == SIGHUP) signal_all(c, number);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (reap(c) && !last) last = now.tv_sec + GRACE_SECONDS;
        if (last && now.tv_sec > last) signal_all(c, SIGKILL);
    }
}

static int code_of(const children *c, int rank)
{
    const int status = c->status[rank];
    return WIFEXITED(status) ? WEXITSTATUS(status) : ERROR_RUNTIME;
}

/* The status of all, and a message if a rank ended by a signal, or if none has written why it ended. */
static int judge(const children *c, const char *name)
{
    enum { BY_SIGNAL = 128 }; // and above: a run that was interrupted and has said so
    uint64_t one;
    int status = 0;
    for (int r = 0; r < c->count; r++) {
        if (WIFSIGNALED(c->status[r]) && !c->killed[r]) {
            fprintf(stderr, "%s: rank %d: ended by signal %d (%s)\n", name, r, WTERMSIG(c->status[r]),
                    strsignal(WTERMSIG(c->status[r])));
            return ERROR_RUNTIME;
        }
        if (!status) status = code_of(c, r);
    }
    if (!status || status > BY_SIGNAL || read(c->voice, &one, sizeof one) != sizeof one) return status;
    fprintf(stderr, "%s: rank %d: ended with status %d\n", name, c->first, code_of(c, c->first));
    return ERROR_RUNTIME;
}

int launch_ranks(int ranks, bool cpus, char **argv, const char *name, error *err)
{
    children c = {.first = -1, .voice = -1};
    sigset_t signals, before;
    if (ranks > MOST_LAUNCHED) {
        fail(err, ERROR_USAGE, "%d ranks on one host, at most %d", ranks, MOST_LAUNCHED);
        return -1;
    }
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGHUP);
    sigaddset(&signals, SIGCHLD);
    sigprocmask(SIG_BLOCK, &signals, &before);
    const bool started = start(&c, ranks, cpus, argv, &before, err);
    if (!started) signal_all(&c, SIGKILL);
    wait_all(&c, &signals);
    sigprocmask(SIG_SETMASK, &before, NULL);
    const int status = started ? judge(&c, name) : -1;
    (void)close(c.voice);
    return status;
}
