/* train/files/file.h: mappings, atomic writes (abort, kill, size limit, full disk), folders and their
 * listing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // unshare, to mount a small file system that gets full
#endif
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/folder.h"
#include "train/files/file.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

enum { BIG = 3 << 20 }; // bytes: more than the writer buffers

static size_t files_in(void **state)
{
    file_list list = {0};
    error err;
    assert_true(file_list_add(&list, *state, &err));
    size_t count = list.count;
    file_list_free(&list);
    return count;
}

static void assert_contents(const char *path, const void *bytes, size_t size)
{
    file_map map;
    error err = {0};
    if (!file_map_open(&map, path, &err)) fail_msg("%s", err.text);
    assert_int_equal(map.size, size);
    assert_memory_equal(map.data, bytes, size);
    file_map_close(&map);
}

static void assert_no_map(const char *path, const char *reason)
{
    file_map map;
    error err = {0};
    assert_false(file_map_open(&map, path, &err));
    assert_int_equal(err.code, ERROR_RUNTIME);
    assert_non_null(strstr(err.text, path));
    if (strstr(err.text, reason) == NULL) fail_msg("\"%s\" lacks \"%s\"", err.text, reason);
}

static void files_are_mapped(void **state)
{
    char path[4096];
    put_file(in_folder(path, state, "a"), "hello", 5);
    assert_contents(path, "hello", 5);
    put_file(in_folder(path, state, "empty"), "", 0);
    assert_no_map(path, "empty");
    assert_no_map(in_folder(path, state, "missing"), "No such file");
    assert_no_map(*state, "is a folder");
    assert_no_map("/dev/null", "not a regular file");
    assert_int_equal(mkfifo(in_folder(path, state, "pipe"), 0600), 0);
    assert_no_map(path, "not a regular file"); // and the call does not wait for a writer of the pipe
}

static void files_are_written_whole(void **state)
{
    char path[4096];
    error err;
    in_folder(path, state, "a");
    assert_true(file_write(path, "old", 3, &err));
    assert_contents(path, "old", 3);

    file_map map; // a mapping of the old file survives its replacement
    assert_true(file_map_open(&map, path, &err));
    assert_true(file_write(path, "newer", 5, &err));
    assert_memory_equal(map.data, "old", 3);
    file_map_close(&map);
    assert_contents(path, "newer", 5);
    assert_int_equal(files_in(state), 1);
}

static void an_aborted_write_leaves_nothing(void **state)
{
    char path[4096];
    file_writer *writer;
    error err;
    in_folder(path, state, "a");
    assert_true(file_write(path, "old", 3, &err));
    assert_true(file_writer_open(&writer, path, &err));
    assert_true(file_writer_write(&writer, "new", 3, &err));
    assert_int_equal(files_in(state), 2);
    file_writer_abort(&writer);
    assert_null(writer);
    file_writer_abort(&writer);
    assert_contents(path, "old", 3);
    assert_int_equal(files_in(state), 1);
}

static void refused_writes_are_errors(void **state)
{
    char path[4096];
    error err;
    assert_false(file_write(*state, "x", 1, &err));
    assert_non_null(strstr(err.text, "is a folder"));
    assert_false(file_write("/dev/full", "x", 1, &err));
    assert_non_null(strstr(err.text, "not a regular file"));
    assert_false(file_write(in_folder(path, state, "no/such/folder"), "x", 1, &err));
    assert_non_null(strstr(err.text, "No such file"));
}

/* Replaces the file `path` by `size` zero bytes in one call, which the test has made impossible. */
static bool write_zeros(const char *path, size_t size, error *err)
{
    char *bytes = calloc(1, size);
    bool ok = file_write(path, bytes, size, err);
    free(bytes);
    return ok;
}

/* A file larger than the writer's buffer fails during the writes, a smaller one only at the commit. */
static void a_size_limit_is_an_error(void **state)
{
    char path[4096];
    error err = {0};
    struct rlimit limit, small;
    in_folder(path, state, "a");
    assert_true(file_write(path, "old", 3, &err));
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    signal(SIGXFSZ, SIG_IGN);
    for (size_t size = BIG; size > 1000; size /= 1000) {
        small = limit;
        small.rlim_cur = size / 2;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        bool ok = write_zeros(path, size, &err);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        assert_false(ok);
        assert_int_equal(err.code, ERROR_RUNTIME);
        assert_non_null(strstr(err.text, strerror(EFBIG)));
        assert_contents(path, "old", 3);
        assert_int_equal(files_in(state), 1);
    }
    signal(SIGXFSZ, SIG_DFL);
}

/* Runs in a child process: mounts a file system of 1 MiB on the folder, which only the child sees. Returns 0,
 * the number of the step that failed, or 77 if mounting is not allowed. */
static int fill_disk(void **state)
{
    char path[4096];
    error err = {0};
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) return 77;
    if (mount("none", *state, "tmpfs", 0, "size=1m") != 0) return 77;
    in_folder(path, state, "a");
    if (!file_write(path, "old", 3, &err)) return 1;
    if (write_zeros(path, BIG, &err)) return 2;
    if (strstr(err.text, strerror(ENOSPC)) == NULL || err.code != ERROR_RUNTIME) return 3;
    if (files_in(state) != 1) return 4;
    assert_contents(path, "old", 3);
    return file_write(path, "newer", 5, &err) ? 0 : 5; // the failed write has freed its space
}

static void a_full_disk_leaves_the_old_file(void **state)
{
    pid_t child = fork();
    if (child == 0) _exit(fill_disk(state));
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void kill_child(pid_t child)
{
    int status;
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
}

/* A process is killed when half of the new bytes or more are in the temporary file: the old file stays. */
static void a_kill_half_way_leaves_the_old_file(void **state)
{
    char path[4096], *bytes = calloc(1, BIG), ready;
    int pipes[2];
    error err;
    in_folder(path, state, "a");
    assert_true(file_write(path, "old", 3, &err));
    assert_int_equal(pipe(pipes), 0);
    pid_t child = fork();
    if (child == 0) {
        file_writer *writer;
        bool ok = file_writer_open(&writer, path, &err) && file_writer_write(&writer, bytes, BIG, &err);
        if (ok && write(pipes[1], "r", 1) == 1) pause();
        _exit(1);
    }
    assert_int_equal(read(pipes[0], &ready, 1), 1);
    assert_int_equal(files_in(state), 2);
    kill_child(child);
    assert_contents(path, "old", 3);
    assert_true(file_write(path, "newer", 5, &err));
    assert_contents(path, "newer", 5);
    close(pipes[0]);
    close(pipes[1]);
    free(bytes);
}

/* Replaces the file again and again until the process is killed. Each version repeats one byte value. */
static void write_generations(const char *path, unsigned char *bytes)
{
    error err;
    for (int generation = 1;; generation++) {
        memset(bytes, generation, BIG);
        if (!file_write(path, bytes, BIG, &err)) _exit(1);
    }
}

/* After a kill at any moment the file must be one complete version. */
static void a_kill_leaves_one_complete_version(void **state)
{
    char path[4096];
    unsigned char *bytes = calloc(1, BIG);
    error err;
    in_folder(path, state, "a");
    assert_true(file_write(path, bytes, BIG, &err));
    for (int turn = 0; turn < 20; turn++) {
        pid_t child = fork();
        if (child == 0) write_generations(path, bytes);
        struct timespec wait = {0, 1000000L + 1700000L * turn};
        nanosleep(&wait, NULL);
        kill_child(child);
        file_map map;
        assert_true(file_map_open(&map, path, &err));
        assert_int_equal(map.size, BIG);
        assert_memory_equal(map.data, map.data + 1, BIG - 1); // all bytes are equal
        file_map_close(&map);
    }
    free(bytes);
}

static void folders_are_made(void **state)
{
    char path[4096];
    error err;
    struct stat info;
    assert_true(file_make_folder(in_folder(path, state, "x/y//z/"), &err));
    assert_int_equal(stat(path, &info), 0);
    assert_true(S_ISDIR(info.st_mode));
    assert_true(file_make_folder(path, &err));
    put_file(in_folder(path, state, "file"), "x", 1);
    assert_false(file_make_folder(path, &err));
    assert_false(file_make_folder(in_folder(path, state, "file/below"), &err));
    assert_non_null(strstr(err.text, "file"));
}

static void folders_are_listed_in_order(void **state)
{
    static const char *const order[] = {"B", "a/b", "a/c/d", "link", "z"}; // by bytes: capitals first
    char path[4096];
    error err;
    file_list list = {0};
    assert_true(file_make_folder(in_folder(path, state, "a/c"), &err));
    assert_true(file_make_folder(in_folder(path, state, ".git"), &err));
    for (int i = 0; i < 5; i++)
        if (i != 3) put_file(in_folder(path, state, order[i]), "1234", (size_t)i);
    put_file(in_folder(path, state, ".git/hidden"), "x", 1);
    put_file(in_folder(path, state, ".hidden"), "x", 1);
    assert_int_equal(symlink("z", in_folder(path, state, "link")), 0);
    assert_int_equal(symlink("..", in_folder(path, state, "a/loop")), 0);
    assert_int_equal(symlink("nowhere", in_folder(path, state, "dangling")), 0);
    assert_int_equal(mkfifo(in_folder(path, state, "pipe"), 0600), 0);

    assert_true(file_list_add(&list, *state, &err));
    assert_int_equal(list.count, 5);
    for (size_t i = 0; i < 5; i++)
        assert_string_equal(list.entries[i].path, in_folder(path, state, order[i]));
    assert_int_equal(list.entries[2].size, 2);
    assert_int_equal(list.entries[3].size, 4);

    assert_false(file_list_add(&list, in_folder(path, state, "missing"), &err));
    assert_non_null(strstr(err.text, "missing"));
    assert_false(file_list_add(&list, "/dev/null", &err));
    assert_int_equal(list.count, 5); // kept
    assert_true(file_list_add(&list, in_folder(path, state, "z"), &err));
    assert_string_equal(list.entries[5].path, path);
    file_list_free(&list);
}

static void errors_keep_their_text(void **state)
{
    (void)state;
    error err;
    char longer[1000];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    assert_false((fail)(&err, ERROR_USAGE, "%s", longer));
    assert_int_equal(err.code, ERROR_USAGE);
    assert_int_equal(strlen(err.text), sizeof err.text - 1);
    assert_string_equal(err.text + sizeof err.text - 5, "x...");
    (fail)(&err, ERROR_RUNTIME, "inner");
    (fail)(&err, ERROR_RUNTIME, "outer: %s", err.text); // the text that is replaced is also an argument
    assert_string_equal(err.text, "outer: inner");
    assert_false((fail)(NULL, ERROR_RUNTIME, "nobody listens"));
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, folder_setup, folder_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_keep_their_text),
        IN_FOLDER(files_are_mapped),
        IN_FOLDER(files_are_written_whole),
        IN_FOLDER(an_aborted_write_leaves_nothing),
        IN_FOLDER(refused_writes_are_errors),
        IN_FOLDER(a_size_limit_is_an_error),
        IN_FOLDER(a_full_disk_leaves_the_old_file),
        IN_FOLDER(a_kill_half_way_leaves_the_old_file),
        IN_FOLDER(a_kill_leaves_one_complete_version),
        IN_FOLDER(folders_are_made),
        IN_FOLDER(folders_are_listed_in_order),
    };
    return cmocka_run_group_tests_name("file", tests, NULL, NULL);
}
