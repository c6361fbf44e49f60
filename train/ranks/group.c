/* See group.h. Messages are a kind, a length and bytes. */
#define _GNU_SOURCE 1
#include "train/ranks/group.h"

#include "base/clock.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    MOST_BYTES = 64 << 10,
    CONNECT_SECONDS = 120,
    NAME_SECONDS = 30,
    HELLO_SECONDS = 10,
    ECHO_SECONDS = 5,
    BEAT_MS = 500
};

typedef enum message_kind { HELLO, REFUSED, SETTINGS, KEY, ABORT, BEAT, BYE } message_kind;

typedef struct message {
    uint32_t magic, kind, bytes;
    char data[MOST_BYTES];
} message;

enum { MAGIC = 0x656f6d73, HEAD = 3 * sizeof(uint32_t) };

typedef struct hello {
    int32_t rank, ranks;
} hello;

typedef struct beat {
    uint64_t progress;
    uint32_t writes;
} beat;

/* What one rank knows of another. */
typedef struct peer {
    int socket;               // -1: none; open until group_close, because both threads use it
    atomic_bool gone;         // the other end is closed
    _Atomic(char *) settings; // when they have come
    bool left;
    beat last;
    double changed;        // the clock when it last made progress
    _Atomic(double) heard; // or said anything
} peer;

struct group {
    rank_place place;
    double peer_timeout;
    const char *name;
    peer *peers; // (ranks) on rank 0; on another rank peers[0] alone
    pthread_t watcher;
    pthread_mutex_t sending;
    atomic_ullong progress;
    atomic_uint writes;
    atomic_bool closing, ended, has_key;
    unsigned char key[GROUP_KEY];
    bool watched;
    message in, out; // of the thread that reads; of the one that sends
};

int group_rank(const group *g)
{
    return g->place.rank;
}

int group_ranks(const group *g)
{
    return g->place.ranks;
}

int group_local(const group *g)
{
    return g->place.local;
}

void group_progress(group *g)
{
    if (g) atomic_fetch_add(&g->progress, 1);
}

void group_writes(group *g, bool writes)
{
    if (g) atomic_store(&g->writes, writes);
}

/* ---- messages ---- */

static bool send_all(int socket, const void *from, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        const ssize_t sent = send(socket, (const char *)from + at, bytes - at, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return false;
        at += (size_t)sent;
    }
    return true;
}

static bool tell(group *g, int socket, message_kind kind, const void *data, size_t bytes)
{
    if (socket < 0 || bytes > MOST_BYTES) return false;
    pthread_mutex_lock(&g->sending);
    g->out = (message){.magic = MAGIC, .kind = kind, .bytes = (uint32_t)bytes};
    if (bytes) memcpy(g->out.data, data, bytes);
    const bool done = send_all(socket, &g->out, HEAD + bytes);
    pthread_mutex_unlock(&g->sending);
    return done;
}

static bool receive_all(int socket, void *to, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        const ssize_t got = recv(socket, (char *)to + at, bytes - at, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += (size_t)got;
    }
    return true;
}

/* The next message, in g->in. False: the connection has ended, or has been silent for too long. */
static bool hear(group *g, int socket)
{
    return socket >= 0 && receive_all(socket, &g->in, HEAD) && g->in.magic == MAGIC &&
           g->in.bytes <= MOST_BYTES && receive_all(socket, g->in.data, g->in.bytes);
}

/* ---- meeting ---- */

/* Whoever is at the other end may be silent: `hear` waits for `seconds`. */
static void prepare_socket(int socket, int seconds)
{
    const int on = 1;
    const struct timeval most = {.tv_sec = seconds};
    (void)setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
}

/* -1 and errno: not possible. A socket of IPv6 takes connections of IPv4 too. */
static int listen_as(int family, const void *at, socklen_t size)
{
    const int on = 1, off = 0, made = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (made < 0) return -1;
    (void)setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (family == AF_INET6) (void)setsockopt(made, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(made, at, size) == 0 && listen(made, 128) == 0) return made;
    const int why = errno;
    close(made);
    errno = why;
    return -1;
}

static int listen_at(int port, error *err)
{
    const struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    const struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int made = listen_as(AF_INET6, &six, sizeof six);
    if (made < 0 && errno != EADDRINUSE) made = listen_as(AF_INET, &four, sizeof four); // no IPv6 here
    if (made < 0)
        fail(err, ERROR_RUNTIME, "rank 0 cannot listen on port %d: %s%s", port, strerror(errno),
             errno == EADDRINUSE || errno == EACCES ? " (set another MASTER_PORT)" : "");
    return made;
}

/* Answers a process that says which rank it is, and closes the connection of one that is not wanted. */
static void answer(group *g, int socket, hello theirs)
{
    const int ranks = g->place.ranks;
    char why[80];
    if (theirs.ranks != ranks)
        snprintf(why, sizeof why, "it is one of %d ranks, rank 0 is one of %d", theirs.ranks, ranks);
    else
        snprintf(why, sizeof why, "another process is rank %d of %d", theirs.rank, ranks);
    const bool fits = theirs.ranks == ranks && theirs.rank > 0 && theirs.rank < ranks,
               wanted = fits && g->peers[theirs.rank].socket < 0;
    if (tell(g, socket, wanted ? HELLO : REFUSED, why, wanted ? 0 : strlen(why)) && wanted)
        g->peers[theirs.rank].socket = socket;
    else
        close(socket);
}

static bool accept_one(group *g, int listener, double end, error *err)
{
    struct pollfd wait = {listener, POLLIN, 0};
    hello theirs;
    const int left = (int)((end - clock_seconds()) * 1e3),
              socket =
                  poll(&wait, 1, left > 0 ? left : 0) == 1 ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : -1;
    if (socket < 0)
        return fail(err, ERROR_RUNTIME, "not all of %d ranks came within %d s", g->place.ranks,
                    CONNECT_SECONDS);
    prepare_socket(socket, HELLO_SECONDS);
    if (hear(g, socket) && g->in.kind == HELLO && g->in.bytes == sizeof theirs) {
        memcpy(&theirs, g->in.data, sizeof theirs);
        answer(g, socket, theirs);
    } else
        close(socket); // not one of ours
    return true;
}

static bool accept_others(group *g, error *err)
{
    const double end = clock_seconds() + CONNECT_SECONDS;
    const int listener = g->place.listener >= 0 ? g->place.listener : listen_at(g->place.port, err);
    bool done = listener >= 0;
    for (int missing = 1; done && missing;) {
        missing = 0;
        for (int r = 1; r < g->place.ranks; r++) missing += g->peers[r].socket < 0;
        if (missing) done = accept_one(g, listener, end, err);
    }
    if (listener >= 0) close(listener);
    return done;
}

/* -1: not connected, and *why. *unknown: nobody knows the name, so that waiting helps only if it is that of a
 * host that comes later. */
static int connect_once(const rank_place *p, const char **why, bool *unknown)
{
    const struct addrinfo wanted = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    char port[16];
    int made = -1;
    snprintf(port, sizeof port, "%d", p->port);
    const int failed = getaddrinfo(p->address, port, &wanted, &found);
    *unknown = failed && failed != EAI_AGAIN && failed != EAI_SYSTEM;
    if (failed) {
        *why = failed == EAI_SYSTEM ? strerror(errno) : gai_strerror(failed);
        return -1;
    }
    for (struct addrinfo *a = found; a; a = a->ai_next) {
        made = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (made >= 0 && connect(made, a->ai_addr, a->ai_addrlen) == 0) break;
        *why = strerror(errno);
        if (made >= 0) close(made);
        made = -1;
    }
    freeaddrinfo(found);
    return made;
}

/* Does rank 0 want this process? */
static bool greet(group *g, int socket, error *err)
{
    const rank_place *p = &g->place;
    const hello own = {p->rank, p->ranks};
    errno = 0;
    if (!tell(g, socket, HELLO, &own, sizeof own) || !hear(g, socket)) {
        if (p->launched && errno != EAGAIN) _exit(ERROR_RUNTIME); // `smoe train --gpus` says how rank 0 ended
        return fail(err, ERROR_RUNTIME, "rank 0 does not answer at %s, port %d", p->address, p->port);
    }
    return g->in.kind != REFUSED ||
           fail(err, ERROR_RUNTIME, "rank 0 at %s, port %d, refuses this process: %.*s", p->address, p->port,
                (int)g->in.bytes, g->in.data);
}

static bool find_first(group *g, error *err)
{
    const double started = clock_seconds();
    const char *why = "";
    bool unknown;
    int socket;
    while ((socket = connect_once(&g->place, &why, &unknown)) < 0) {
        const double waited = clock_seconds() - started;
        if (waited > (unknown ? NAME_SECONDS : CONNECT_SECONDS))
            return fail(err, ERROR_RUNTIME, "rank 0 was not reached at %s, port %d, within %.0f s: %s",
                        g->place.address, g->place.port, waited, why);
        usleep(100000);
    }
    prepare_socket(socket, CONNECT_SECONDS);
    if (greet(g, socket, err)) {
        g->peers[0].socket = socket;
        return true;
    }
    close(socket);
    return false;
}

static void *watch(void *user);

bool group_connect(group **made, const rank_place *place, double peer_timeout, const char *name, error *err)
{
    group *g = *made = calloc(1, sizeof *g);
    if (g) g->peers = calloc((size_t)place->ranks, sizeof *g->peers);
    if (!g || !g->peers) return fail(err, ERROR_RUNTIME, "out of memory: the ranks");
    g->place = *place;
    g->peer_timeout = peer_timeout;
    g->name = name;
    pthread_mutex_init(&g->sending, NULL);
    atomic_store(&g->writes, true);
    for (int r = 0; r < place->ranks; r++) g->peers[r].socket = -1;
    if (!(place->rank == 0 ? accept_others(g, err) : find_first(g, err))) return false;
    // Rank 0 says nothing until all have come.
    const double now = clock_seconds() + (place->rank == 0 ? 0 : CONNECT_SECONDS);
    for (int r = 0; r < place->ranks; r++) {
        g->peers[r].changed = now;
        g->peers[r].heard = now;
    }
    g->watched = pthread_create(&g->watcher, NULL, watch, g) == 0;
    return g->watched || fail(err, ERROR_RUNTIME, "the thread that watches the ranks does not start");
}

/* ---- failing ---- */

typedef struct last_words {
    int32_t code, rank;
    char text[sizeof((error *)0)->text];
} last_words;

static void tell_all(group *g, message_kind kind, const void *data, size_t bytes)
{
    for (int r = 0; r < g->place.ranks; r++)
        if (g->peers[r].socket >= 0 && !atomic_load(&g->peers[r].gone))
            (void)tell(g, g->peers[r].socket, kind, data, bytes);
}

/* Under `smoe train --gpus` whoever takes the 1 of `voice` writes, and no other. */
static void write_words(const group *g, const last_words *w)
{
    uint64_t one;
    if (g->place.launched && read(g->place.voice, &one, sizeof one) != sizeof one) return;
    fprintf(stderr, "%s%s: rank %d: %s\n", isatty(STDERR_FILENO) ? "\n" : "", g->name, w->rank, w->text);
}

/* May this rank write what the others know too? */
static bool is_voice(const group *g)
{
    return g->place.launched || g->place.rank <= 1;
}

/* Waits until the others have closed their connections, but not long: bytes that were sent and not read would
 * be lost with them. */
static void drain(group *g)
{
    char lost[4096];
    const double last = clock_seconds() + 2.0;
    for (int r = 0; r < g->place.ranks; r++)
        if (g->peers[r].socket >= 0) (void)shutdown(g->peers[r].socket, SHUT_WR);
    for (int r = 0; r < g->place.ranks; r++) {
        struct pollfd wait = {g->peers[r].socket, POLLIN, 0};
        while (g->peers[r].socket >= 0 && clock_seconds() < last && poll(&wait, 1, 200) >= 0)
            if (wait.revents && recv(g->peers[r].socket, lost, sizeof lost, MSG_DONTWAIT) <= 0) break;
    }
}

/* Ends this process for the reason `w`. Only the first reason counts. */
static _Noreturn void end(group *g, const last_words *w, bool write)
{
    while (atomic_exchange(&g->ended, true)) pause(); // another thread ends it
    if (write) write_words(g, w);
    tell_all(g, ABORT, w, sizeof *w);
    drain(g);
    _exit(w->code);
}

/* Another rank than 0 waits for the echo of its words, with which its process ends. Without one it may be the
 * only one to write them. */
void group_fail(group *g, const error *why)
{
    last_words w = {.code = why->code, .rank = g->place.rank};
    snprintf(w.text, sizeof w.text, "%s", why->text);
    if (g->place.rank > 0) {
        tell_all(g, ABORT, &w, sizeof w);
        while (g->watched && clock_seconds() < g->peers[0].heard + ECHO_SECONDS) usleep(100000);
    }
    end(g, &w, true);
}

/* ---- agreeing ---- */

/* The first line in which two texts differ, to two buffers. */
static void find_difference(const char *mine, const char *theirs, char a[96], char b[96])
{
    while (*mine && *theirs) {
        const size_t x = strcspn(mine, "\n"), y = strcspn(theirs, "\n");
        if (x != y || memcmp(mine, theirs, x) != 0) break;
        mine += x + (mine[x] == '\n');
        theirs += y + (theirs[y] == '\n');
    }
    snprintf(a, 96, "%.*s", (int)strcspn(mine, "\n"), mine);
    snprintf(b, 96, "%.*s", (int)strcspn(theirs, "\n"), theirs);
}

static void compare(group *g, int rank, const char *mine, const char *theirs)
{
    char a[96], b[96];
    if (strcmp(mine, theirs) == 0) return;
    find_difference(mine, theirs, a, b);
    last_words w = {.code = ERROR_RUNTIME, .rank = rank};
    snprintf(w.text, sizeof w.text, "has %s, but rank 0 has %s", b, a);
    end(g, &w, true);
}

/* The watcher receives what the others send. It ends the process if nothing comes. */
bool group_agree(group *g, const char *settings, error *err)
{
    if (strlen(settings) >= MOST_BYTES) return fail(err, ERROR_USAGE, "the settings have too much text");
    if (g->place.rank > 0) (void)tell(g, g->peers[0].socket, SETTINGS, settings, strlen(settings));
    for (int r = 1; g->place.rank == 0 && r < g->place.ranks; r++) {
        while (!g->peers[r].settings) usleep(1000);
        compare(g, r, settings, g->peers[r].settings);
    }
    return true;
}

void group_share_key(group *g, unsigned char key[GROUP_KEY])
{
    if (g->place.rank == 0) {
        tell_all(g, KEY, key, GROUP_KEY);
    } else {
        while (!g->has_key) usleep(1000);
        memcpy(key, g->key, GROUP_KEY);
    }
    group_writes(g, false);
}

/* ---- watching ---- */

static beat own_beat(group *g)
{
    return (beat){atomic_load(&g->progress), atomic_load(&g->writes)};
}

static void note_beat(peer *p, beat now)
{
    p->heard = clock_seconds();
    if (now.progress != p->last.progress || now.writes) p->changed = p->heard;
    p->last = now;
}

/* What a message, or the end of the connection, says about a rank. */
static void listen_to(group *g, int rank)
{
    peer *p = &g->peers[rank];
    last_words w = {.code = ERROR_RUNTIME, .rank = rank, .text = "ended without a message"};
    beat now;
    if (!hear(g, p->socket)) {
        atomic_store(&p->gone, true); // `smoe train --gpus` says how it ended
        if (!p->left && !atomic_load(&g->closing)) end(g, &w, is_voice(g) && !g->place.launched);
        return;
    }
    p->heard = clock_seconds();
    switch (g->in.kind) {
    case SETTINGS:
        if (!p->settings) p->settings = strndup(g->in.data, g->in.bytes);
        break;
    case KEY:
        memcpy(g->key, g->in.data, sizeof g->key);
        atomic_store(&g->has_key, true);
        break;
    case ABORT:
        memcpy(&w, g->in.data, g->in.bytes < sizeof w ? g->in.bytes : sizeof w);
        end(g, &w, g->place.rank == 0);
        break;
    case BEAT:
        memcpy(&now, g->in.data, sizeof now);
        note_beat(p, now);
        break;
    case BYE: p->left = true; break;
    default: break;
    }
}

/* Rank 0: a rank that has said nothing for too long is hung. If all have made no progress for too long, it is
 * the one that has said nothing since, or else the one with the least progress: the others wait for it. The
 * other ranks: is rank 0 silent? */
static void check_progress(group *g)
{
    const double now = clock_seconds();
    int slowest = 0;
    bool all = true, silent = false;
    for (int r = 0; r < (g->place.rank == 0 ? g->place.ranks : 1); r++) {
        const peer *p = &g->peers[r];
        if (p->left) return;
        all = all && now - p->changed > g->peer_timeout;
        if (silent) continue;
        silent = now - p->heard > 8 * BEAT_MS * 1e-3;
        if (silent || p->last.progress < g->peers[slowest].last.progress) slowest = r;
    }
    if (!all && !(silent && now - g->peers[slowest].heard > g->peer_timeout)) return;
    last_words w = {.code = ERROR_RUNTIME, .rank = slowest};
    snprintf(w.text, sizeof w.text, "no progress for %.0f s (--peer-timeout)", g->peer_timeout);
    end(g, &w, is_voice(g));
}

/* On another rank than 0, rank 0's beats come whether it makes progress or not. */
static void send_beats(group *g)
{
    beat now = own_beat(g);
    if (g->place.rank == 0) {
        note_beat(&g->peers[0], now);
        now.progress = (uint64_t)(clock_seconds() * 1e3);
    }
    tell_all(g, BEAT, &now, sizeof now);
}

static void *watch(void *user)
{
    group *g = user;
    const int peers = g->place.rank == 0 ? g->place.ranks : 1;
    struct pollfd *wait = calloc((size_t)peers, sizeof *wait);
    double next = 0;
    while (wait && !atomic_load(&g->closing)) {
        for (int r = 0; r < peers; r++)
            wait[r] = (struct pollfd){atomic_load(&g->peers[r].gone) ? -1 : g->peers[r].socket, POLLIN, 0};
        (void)poll(wait, (nfds_t)peers, BEAT_MS / 4);
        for (int r = 0; r < peers; r++)
            if (wait[r].revents && !atomic_load(&g->ended)) listen_to(g, r);
        if (clock_seconds() < next) continue;
        send_beats(g);
        check_progress(g);
        next = clock_seconds() + BEAT_MS * 1e-3;
    }
    free(wait);
    return NULL;
}

void group_close(group *g)
{
    if (!g) return;
    tell_all(g, BYE, NULL, 0);
    atomic_store(&g->closing, true);
    if (g->watched) pthread_join(g->watcher, NULL);
    for (int r = 0; g->peers && r < g->place.ranks; r++) {
        if (g->peers[r].socket >= 0) close(g->peers[r].socket);
        free(g->peers[r].settings);
    }
    free(g->peers);
    free(g);
}
