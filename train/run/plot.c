/* See plot.h. The script for gnuplot contains the data. gnuplot draws curve.png.tmp, which is then renamed.
 */
#define _POSIX_C_SOURCE 200809L
#include "train/run/plot.h"

#include "train/files/file.h"
#include "train/run/log.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static void write_data(FILE *script, const log_line *lines, size_t count, double unit, bool validation)
{
    fprintf(script, "$%s << EOD\n", validation ? "validation" : "training");
    for (size_t i = 0; i < count; i++) {
        double loss = validation ? lines[i].val_loss : lines[i].loss;
        if (isfinite(loss)) fprintf(script, "%.6f %.6f\n", (double)lines[i].tokens / 1e6, loss * unit);
    }
    fprintf(script, "EOD\n");
}

/* Inside single quotes gnuplot reads every character literally, except that two quotes stand for one. */
static void write_quoted(FILE *script, const char *text)
{
    fputc('\'', script);
    for (; *text; text++) {
        if (*text == '\'') fputc('\'', script);
        fputc(*text, script);
    }
    fputs("'\n", script);
}

/* Is a token a byte? Then a loss in bits a token is one in bits per byte. */
static bool has_bytes(const log_line *line)
{
    return fabs(line->bits_per_byte * log(2.0) - line->loss) <= 1e-6 * fabs(line->loss); // false for NAN
}

static bool write_script(const char *path, const char *image, const log_line *lines, size_t count, error *err)
{
    FILE *script = fopen(path, "w");
    if (!script) return fail(err, ERROR_RUNTIME, "%s: %s", path, strerror(errno));
    bool bytes = count > 0 && has_bytes(&lines[0]);
    double unit = bytes ? 1.0 / log(2.0) : 1.0;
    write_data(script, lines, count, unit, false);
    write_data(script, lines, count, unit, true);
    fprintf(script, "set terminal pngcairo size 900,560 font 'sans,11'\nset output ");
    write_quoted(script, image);
    fprintf(script,
            "set xlabel 'tokens, millions'\nset ylabel '%s'\nset grid lc rgb '#dddddd'\nset border 3\n"
            "set tics nomirror\nplot $training with lines lc rgb '#9ab8d8' title 'training', \\\n"
            "     $validation with linespoints pt 7 ps 0.7 lw 2 lc rgb '#c0392b' title 'validation'\n",
            bytes ? "bits per byte" : "loss, nats a token");
    if (fclose(script) == 0) return true;
    return fail(err, ERROR_RUNTIME, "%s: %s", path, strerror(errno));
}

/* Runs gnuplot on a script without output. Returns its exit status, or -1 if it could not be started or
 * crashed. */
static int run_gnuplot(char *script)
{
    pid_t child;
    posix_spawn_file_actions_t actions;
    if (posix_spawn_file_actions_init(&actions) != 0) return -1;
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    char *arguments[] = {(char[]){"gnuplot"}, script, NULL};
    int status = -1, failed = posix_spawnp(&child, "gnuplot", &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (failed || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
    return WEXITSTATUS(status);
}

bool plot_curves(const char *out, bool *drawn, error *err)
{
    char log[FILE_PATH_BYTES], script[FILE_PATH_BYTES], made[FILE_PATH_BYTES], image[FILE_PATH_BYTES];
    log_line *lines;
    size_t count;
    *drawn = false;
    if (!file_join(log, out, "train.jsonl", err) || !file_join(script, out, "curve.gp.tmp", err) ||
        !file_join(made, out, "curve.png.tmp", err) || !file_join(image, out, "curve.png", err) ||
        !log_read(log, &lines, &count, err))
        return false;
    bool done = write_script(script, made, lines, count, err);
    free(lines);
    if (done && run_gnuplot(script) == 0) *drawn = rename(made, image) == 0;
    unlink(script);
    if (!*drawn) unlink(made);
    return done;
}
