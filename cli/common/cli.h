/* The subcommands of `smoe`, one file each. argv[0] is the name to show ("smoe bench"); the result is the
 * exit status: 0 ok, 1 a check failed, 2 usage, 3 run-time failure; train interrupted by INT or TERM, its
 * checkpoint saved: 130, 143. */
#ifndef CLI_H
#define CLI_H

int smoe_cli_train(int argc, char **argv);
int smoe_cli_generate(int argc, char **argv);
int smoe_cli_eval(int argc, char **argv);
int smoe_cli_bench(int argc, char **argv);
int smoe_cli_verify(int argc, char **argv);
int smoe_cli_info(int argc, char **argv);

#endif
