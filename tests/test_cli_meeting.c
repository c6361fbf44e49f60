/* How the processes of a run on several ranks meet: where each one's rank comes from, which processes rank 0
 * wants, and what those say that it does not reach, does not want or does not answer. */
#include "tests/cli_process.h"

#include "train/ranks/group.h"
#include "train/ranks/launch.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

static int set_up(void **state)
{
    if (folder_setup(state) != 0) return -1;
    put_texts(state);
    return 0;
}

/* A socket with a port that nobody else uses until it is closed. Rank 0 can listen there all the same, as
 * long as this socket does not. */
static int reserve_port(int *port)
{
    const int on = 1, made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t size = sizeof at;
    assert_int_equal(setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), 0);
    assert_int_equal(bind(made, (struct sockaddr *)&at, size), 0);
    assert_int_equal(getsockname(made, (struct sockaddr *)&at, &size), 0);
    *port = ntohs(at.sin_port);
    return made;
}

/* A process that has been started as a rank: by --gpus if there is a voice (train/ranks/place.h). */
static pid_t start_with(void **state, int rank, int ranks, int port, int voice, const char *options,
                        const char *messages)
{
    char environment[256], command[512];
    const int length = snprintf(
        environment, sizeof environment,
        voice < 0 ? "RANK=%d WORLD_SIZE=%d LOCAL_RANK=%d MASTER_ADDR=localhost MASTER_PORT=%d"
                  : "SMOE_RANK=%d SMOE_RANKS=%d SMOE_LOCAL_RANK=%d SMOE_ADDRESS=127.0.0.1 SMOE_PORT=%d",
        rank, ranks, rank, port);
    if (voice >= 0)
        snprintf(environment + length, sizeof environment - (size_t)length, " SMOE_VOICE=%d", voice);
    snprintf(command, sizeof command, "train -o met " TINY "--batch 12 --steps 1 --device cpu %s text.txt",
             options);
    return start(state, environment, command, messages);
}

static pid_t start_rank(void **state, int rank, int ranks, int port, const char *messages)
{
    return start_with(state, rank, ranks, port, -1, "", messages);
}

/* A connection to rank 0, as soon as it listens. */
static int reach_rank_0(int port)
{
    const double end = clock_seconds() + HANG_SECONDS;
    const int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    while (connect(made, (const struct sockaddr *)&at, sizeof at) != 0) {
        if (clock_seconds() > end) fail_msg("rank 0 does not listen");
        usleep(20000);
    }
    return made;
}

enum { SETTINGS = 2, KEY = 3, BEAT = 5, BEAT_BYTES = 16, HEAD = 3 * sizeof(uint32_t) };

/* Accepts a rank, as its rank 0, and answers its HELLO with `answers` messages, of which the second is a sign
 * of life. */
static int be_rank_0(int listener, int answers)
{
    uint32_t hello[5], sign[(HEAD + BEAT_BYTES) / sizeof(uint32_t)] = {0};
    struct pollfd comes = {listener, POLLIN, 0};
    assert_int_equal(poll(&comes, 1, 1000 * HANG_SECONDS), 1);
    const int made = accept(listener, NULL, NULL);
    assert_true(recv(made, hello, sizeof hello, MSG_WAITALL) == sizeof hello);
    hello[2] = 0; // bytes that follow
    sign[0] = hello[0], sign[1] = BEAT, sign[2] = BEAT_BYTES;
    if (answers > 0) assert_true(send(made, hello, HEAD, 0) == HEAD);
    if (answers > 1) assert_true(send(made, sign, sizeof sign, 0) == sizeof sign);
    return made;
}

static void a_rank_says_that_rank_0_closed_its_connection(void **state)
{
    int port;
    const int reserved = reserve_port(&port);
    char message[128];
    assert_int_equal(listen(reserved, 1), 0);
    pid_t run = start_rank(state, 2, 3, port, "early");
    close(be_rank_0(reserved, 0));
    assert_int_equal(status_of(run), 3);
    snprintf(message, sizeof message, "smoe train: rank 2: rank 0 does not answer at localhost, port %d",
             port);
    assert_message(state, "early", message);
    run = start_rank(state, 1, 3, port, "late");
    close(be_rank_0(reserved, 1));
    assert_int_equal(status_of(run), 3);
    assert_message(state, "late", "smoe train: rank 0: ended without a message");
    close(reserved);
}

/* Under --gpus the process that started both says how rank 0 ended. */
static void a_rank_leaves_the_end_of_rank_0_to_its_parent(void **state)
{
    int port;
    const int reserved = reserve_port(&port), voice = eventfd(1, EFD_NONBLOCK);
    assert_int_equal(listen(reserved, 1), 0);
    for (int answers = 0; answers < 2; answers++) {
        const pid_t run = start_with(state, 1, 2, port, voice, "", "messages");
        close(be_rank_0(reserved, answers));
        assert_int_equal(status_of(run), 3);
        assert_string_equal(contents(state, "messages"), "");
    }
    close(voice);
    close(reserved);
}

/* Rank 0 gives the key, but no memory of that name, and then is silent. */
static void a_rank_whose_words_nobody_answers_writes_them(void **state)
{
    uint32_t head[3] = {0};
    char data[1 << 14], key[sizeof head + GROUP_KEY] = {0};
    int port;
    const int reserved = reserve_port(&port);
    assert_int_equal(listen(reserved, 1), 0);
    const pid_t run = start_rank(state, 2, 3, port, "messages");
    const int made = be_rank_0(reserved, 1);
    while (head[1] != SETTINGS) {
        assert_true(recv(made, head, sizeof head, MSG_WAITALL) == sizeof head);
        assert_true(recv(made, data, head[2], MSG_WAITALL) == head[2]);
    }
    head[1] = KEY;
    head[2] = GROUP_KEY;
    memcpy(key, head, sizeof head);
    assert_true(send(made, key, sizeof key, 0) == sizeof key);
    assert_int_equal(status_of(run), 3);
    assert_message(state, "messages", "smoe train: rank 2: shared memory ");
    close(made);
    close(reserved);
}

/* The same under --gpus, before the run has begun. */
static void a_rank_whose_words_nobody_answers_writes_them_early(void **state)
{
    int port;
    const int reserved = reserve_port(&port), voice = eventfd(1, EFD_NONBLOCK);
    assert_int_equal(listen(reserved, 1), 0);
    const pid_t run = start_with(state, 1, 2, port, voice, "missing.txt", "messages");
    const int made = be_rank_0(reserved, 2);
    assert_int_equal(status_of(run), 3);
    assert_message(state, "messages", "smoe train: rank 1: missing.txt: ");
    close(made);
    close(voice);
    close(reserved);
}

/* Nobody says anything until all have the same settings. */
static void a_rank_that_is_silent_from_the_start_is_named(void **state)
{
    const uint32_t hello[] = {0x656f6d73, 0, 2 * sizeof(uint32_t), 1, 2};
    int port;
    const int reserved = reserve_port(&port);
    const pid_t run = start_with(state, 0, 2, port, -1, "--peer-timeout 2", "messages");
    const int made = reach_rank_0(port);
    assert_true(send(made, hello, sizeof hello, 0) == sizeof hello);
    assert_int_equal(status_of(run), 3);
    assert_message(state, "messages", "smoe train: rank 1: no progress for 2 s (--peer-timeout)");
    close(made);
    close(reserved);
}

static void another_version_is_named(void **state)
{
    static const char settings[] = "smoe 0.0.1\n";
    const uint32_t hello[] = {0x656f6d73, 0, 2 * sizeof(uint32_t), 1, 2},
                   head[] = {0x656f6d73, SETTINGS, sizeof settings - 1};
    int port;
    const int reserved = reserve_port(&port);
    const pid_t run = start_rank(state, 0, 2, port, "messages");
    const int made = reach_rank_0(port);
    assert_true(send(made, hello, sizeof hello, 0) == sizeof hello);
    assert_true(send(made, head, sizeof head, 0) == sizeof head);
    assert_true(send(made, settings, sizeof settings - 1, 0) == sizeof settings - 1);
    assert_int_equal(status_of(run), 3);
    assert_message(state, "messages", "smoe train: rank 1: has smoe 0.0.1, but rank 0 has smoe ");
    close(made);
    close(reserved);
}

/* Under --gpus any rank may say it, but one alone does. */
static void a_silent_rank_0_is_named_once(void **state)
{
    static const char *const messages[] = {"rank1", "rank2"};
    int port, made[2];
    pid_t runs[2];
    char command[8192];
    const int reserved = reserve_port(&port), voice = eventfd(1, EFD_NONBLOCK);
    assert_int_equal(listen(reserved, 2), 0);
    for (int r = 0; r < 2; r++)
        runs[r] = start_with(state, r + 1, 3, port, voice, "--peer-timeout 2", messages[r]);
    for (int r = 0; r < 2; r++) made[r] = be_rank_0(reserved, 2);
    for (int r = 0; r < 2; r++) assert_int_equal(status_of(runs[r]), 3);
    snprintf(command, sizeof command, "cd '%s' && cat rank1 rank2 >both", (const char *)*state);
    assert_int_equal(system(command), 0);
    assert_message(state, "both", "smoe train: rank 0: no progress for 2 s (--peer-timeout)");
    for (int r = 0; r < 2; r++) close(made[r]);
    close(voice);
    close(reserved);
}

/* This program again, as ranks that say nothing and return SILENT. */
enum { SILENT = 5 };

static void a_rank_that_says_nothing_has_its_status_named(void **state)
{
    char path[4096];
    const pid_t run = fork();
    if (run == 0) {
        char *argv[] = {(char[]){"test"}, (char[]){"silent"}, NULL};
        error err;
        if (!freopen(in_folder(path, state, "messages"), "w", stderr)) _exit(1);
        const int status = launch_ranks(2, true, argv, "smoe train", &err);
        fflush(stderr);
        _exit(status);
    }
    assert_int_equal(status_of(run), 3);
    const char *text = contents(state, "messages"), *found = strstr(text, ": ended with status 5\n");
    if (!found || strchr(text, '\n')[1]) fail_msg("'%s'", text);
}

/* While rank 1 is missing there is one rank 2 too many, and one that belongs to another run. */
static void a_process_that_is_not_wanted_is_told_why(void **state)
{
    static const char *const twins[] = {"twin0", "twin1"};
    char message[128];
    int port, refused = 0;
    const int reserved = reserve_port(&port);
    pid_t wanted[3] = {start_rank(state, 0, 3, port, "rank0")};
    for (int i = 0; i < 2; i++) wanted[1 + i] = start_rank(state, 2, 3, port, twins[i]);
    const pid_t other = start_rank(state, 3, 4, port, "other");
    assert_int_equal(status_of(other), 3);
    snprintf(message, sizeof message,
             "smoe train: rank 3: rank 0 at localhost, port %d, refuses this process: "
             "it is one of 4 ranks, rank 0 is one of 3\n",
             port);
    assert_message(state, "other", message);
    const double end = clock_seconds() + HANG_SECONDS;
    while (!*contents(state, twins[refused])) {
        if (clock_seconds() > end) fail_msg("none of two processes is refused");
        usleep(20000);
        refused ^= 1;
    }
    assert_int_equal(status_of(wanted[1 + refused]), 3);
    snprintf(message, sizeof message,
             "smoe train: rank 2: rank 0 at localhost, port %d, refuses this process: "
             "another process is rank 2 of 3\n",
             port);
    assert_message(state, twins[refused], message);
    wanted[1 + refused] = start_rank(state, 1, 3, port, "rank1");
    for (int i = 0; i < 3; i++) assert_int_equal(status_of(wanted[i]), 0);
    close(reserved);
}

static void a_host_that_does_not_exist_is_named(void **state)
{
    const double started = clock_seconds();
    const pid_t run = start(state, "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=::1%nowhere MASTER_PORT=1",
                            "train -o lost " TINY "--device cpu text.txt", "messages");
    assert_int_equal(status_of(run), 3);
    assert_true(clock_seconds() - started < HANG_SECONDS / 2);
    assert_message(state, "messages",
                   "smoe train: rank 1: rank 0 was not reached at ::1%nowhere, port 1, within ");
}

/* Something that connects to rank 0 and says nothing, such as a scan of ports. */
static void a_silent_stranger_holds_nobody_up(void **state)
{
    int port;
    const int reserved = reserve_port(&port);
    const pid_t first = start_rank(state, 0, 2, port, "first");
    const int stranger = reach_rank_0(port);
    const pid_t second = start_rank(state, 1, 2, port, "second");
    assert_int_equal(status_of(second), 0);
    assert_int_equal(status_of(first), 0);
    close(stranger);
    close(reserved);
}

/* From now on this process, and all that it starts, cannot make sockets of IPv6, as on a host without it. */
static bool refuse_ipv6(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args)), // its low half
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_INET6, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAFNOSUPPORT),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog filter = {sizeof code / sizeof code[0], code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

static void a_host_without_ipv6_has_ranks(void **state)
{
    enum { NO_FILTER = 77 };
    int port, statuses[2];
    const int reserved = reserve_port(&port);
    const pid_t host = fork();
    if (host == 0) {
        if (!refuse_ipv6()) _exit(NO_FILTER);
        const pid_t ranks[2] = {start_rank(state, 0, 2, port, "rank0"),
                                start_rank(state, 1, 2, port, "rank1")};
        for (int r = 0; r < 2; r++) waitpid(ranks[r], &statuses[r], 0);
        _exit(statuses[0] || statuses[1]);
    }
    const int status = status_of(host);
    close(reserved);
    if (status == NO_FILTER) skip();
    if (status) fail_msg("'%s'", contents(state, "rank0"));
}

/* Two ranks that were started by something else and differ. */
static void expect_difference(void **state, const char *first, const char *second, const char *message)
{
    int port;
    const int reserved = reserve_port(&port);
    const char *sizes = TINY "--device cpu --steps 4 --evaluations 0 --checkpoints 1";
    char environment[256], command[512];
    pid_t ranks[2];
    for (int r = 0; r < 2; r++) {
        snprintf(environment, sizeof environment,
                 "RANK=%d WORLD_SIZE=2 LOCAL_RANK=%d MASTER_ADDR=localhost MASTER_PORT=%d", r, r, port);
        snprintf(command, sizeof command, "train %s %s", sizes, r ? second : first);
        ranks[r] = start(state, environment, command, r ? "second" : "first");
    }
    for (int r = 0; r < 2; r++) assert_int_equal(status_of(ranks[r]), 3);
    close(reserved);
    snprintf(command, sizeof command,
             "test -z \"$(find /dev/shm -name 'smoe-%d-*' -newer '%.400s/text.txt')\"", (int)ranks[0],
             (const char *)*state);
    assert_int_equal(system(command), 0);
    snprintf(command, sizeof command, "cat '%s/first' '%s/second' >'%s/both'", (const char *)*state,
             (const char *)*state, (const char *)*state);
    assert_int_equal(system(command), 0);
    assert_message(state, "both", message);
}

static void differences_are_named(void **state)
{
    char path[4096];
    put_file(in_folder(path, state, "other.txt"), "another text, another text, another text, another text",
             50);
    expect_difference(state, "-o a --lr 0.001 text.txt", "-o a --lr 0.002 text.txt",
                      "rank 1: has --lr 0.002, but rank 0 has --lr 0.001");
    expect_difference(state, "-o a text.txt", "-o a --compute f8 text.txt",
                      "rank 1: has --compute f8, but rank 0 has --compute bf16");
    expect_difference(state, "-o b text.txt", "-o b other.txt", "rank 1: has a text of 50 tokens");
    expect_difference(state, "-o c text.txt", "-o c --hidden 32 text.txt", "rank 1: has --hidden 32");
    expect_difference(state, "-o d text.txt", "-o nowhere/d text.txt",
                      "rank 1: nowhere/d/step-0000000.tmp/model.safetensors: cannot write");
    expect_difference(state, "-o e text.txt", "-o e missing.txt", "rank 1: missing.txt: ");
}

static void ranks_come_from_the_environment(void **state)
{
    static char output[OUTPUT_BYTES];
    static const struct {
        const char *environment, *message;
    } wrong[] = {{"RANK=0", "the environment has no WORLD_SIZE"},
                 {"RANK=2 WORLD_SIZE=2 LOCAL_RANK=0", "RANK is '2', not a number in 0..1"},
                 {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", "the environment has no MASTER_ADDR"},
                 {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=x", "MASTER_PORT is 'x'"},
                 {"SLURM_STEP_NUM_TASKS=2", "the environment has no SLURM_PROCID"},
                 {"OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1",
                  "the environment has no OMPI_COMM_WORLD_LOCAL_RANK"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        assert_int_equal(run(state, wrong[i].environment, "train " TINY "--device cpu text.txt", output), 2);
        if (!strstr(output, wrong[i].message)) fail_msg("'%s', not '%s'", output, wrong[i].message);
    }
    expect(state, "train --gpus 2 " TINY "--device cpu --batch 3 text.txt", 2, "--batch is 3");
    assert_int_equal(run(state, "", "train --gpus 2 " TINY "--device cpu -", output), 2);
    assert_string_equal(output,
                        "smoe train: - is the text on standard input, which several ranks cannot share\n");
    expect(state, "train --gpus 0 " TINY "text.txt", 2, "--gpus: '0'");
}

static int port_with(const char *name, const char *value)
{
    rank_place place;
    error err = {0};
    setenv(name, value, 1);
    if (!rank_place_read(&place, &err)) fail_msg("%s", err.text);
    return place.port;
}

static void two_runs_have_two_ports(void **state)
{
    char environment[128], message[128];
    int port;
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    setenv("OMPI_COMM_WORLD_RANK", "1", 1);
    setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1", 1);
    setenv("MASTER_ADDR", "localhost", 1);
    const int one = port_with("PMIX_NAMESPACE", "prterun-vm-20946@1");
    assert_int_not_equal(one, port_with("PMIX_NAMESPACE", "prterun-vm-20947@1"));
    assert_int_equal(one, port_with("PMIX_NAMESPACE", "prterun-vm-20946@1"));
    setenv("SLURM_STEP_NUM_TASKS", "2", 1);
    setenv("SLURM_PROCID", "1", 1);
    setenv("SLURM_LOCALID", "1", 1);
    setenv("SLURM_STEP_ID", "0", 1);
    const int job = port_with("SLURM_JOB_ID", "17"), next = port_with("SLURM_JOB_ID", "18");
    assert_int_not_equal(job, next);
    assert_int_not_equal(next, port_with("SLURM_STEP_ID", "1"));
    leave_job();

    const int taken = reserve_port(&port);
    assert_int_equal(listen(taken, 1), 0);
    snprintf(environment, sizeof environment,
             "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 "
             "OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_PORT=%d",
             port);
    snprintf(message, sizeof message,
             "rank 0 cannot listen on port %d: Address already in use (set another MASTER_PORT)", port);
    assert_int_equal(status_of(start(state, environment, "train " TINY "--device cpu text.txt", "messages")),
                     3);
    if (!strstr(contents(state, "messages"), message)) fail_msg("'%s'", contents(state, "messages"));
    close(taken);
}

int main(int argc, char **argv)
{
    (void)argv;
    if (argc > 1) return SILENT;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_rank_says_that_rank_0_closed_its_connection, set_up,
                                        folder_teardown),
        cmocka_unit_test_setup_teardown(a_rank_whose_words_nobody_answers_writes_them, set_up,
                                        folder_teardown),
        cmocka_unit_test_setup_teardown(a_rank_whose_words_nobody_answers_writes_them_early, set_up,
                                        folder_teardown),
        cmocka_unit_test_setup_teardown(a_rank_leaves_the_end_of_rank_0_to_its_parent, set_up,
                                        folder_teardown),
        cmocka_unit_test_setup_teardown(a_rank_that_is_silent_from_the_start_is_named, set_up,
                                        folder_teardown),
        cmocka_unit_test_setup_teardown(another_version_is_named, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(a_silent_rank_0_is_named_once, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(a_rank_that_says_nothing_has_its_status_named, set_up,
                                        folder_teardown),
        cmocka_unit_test_setup_teardown(a_process_that_is_not_wanted_is_told_why, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(a_host_that_does_not_exist_is_named, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(a_silent_stranger_holds_nobody_up, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(a_host_without_ipv6_has_ranks, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(differences_are_named, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(ranks_come_from_the_environment, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(two_runs_have_two_ports, set_up, folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
