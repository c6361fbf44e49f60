/* The subcommands of `smoe`, one file each. argv[0] is the name to show ("smoe bench"). The result is the
 * exit status: 0 success, 1 a check failed, 2 wrong arguments, 3 run-time failure; 129, 130 and 143 if train
 * was interrupted by HUP, INT or TERM and saved a checkpoint. */
#ifndef CLI_H
#define CLI_H

/* Says on stderr if OpenBLAS runs slow kernels (base/blas_core.h): for commands that compute on the CPU. */
void cli_show_blas_fault(void);

int smoe_cli_train(int argc, char **argv);
int smoe_cli_generate(int argc, char **argv);
int smoe_cli_eval(int argc, char **argv);
int smoe_cli_bench(int argc, char **argv);
int smoe_cli_verify(int argc, char **argv);
int smoe_cli_info(int argc, char **argv);

#endif
