/* What every checkpoint of a run takes over from the checkpoint that its first weights are from (--from) or
 * that it resumes, and that smoe does not change: keys of config.json, and files for other programs, such as
 * generation_config.json and the tokenizer of Transformers. */
#ifndef TRAIN_CARRIED_H
#define TRAIN_CARRIED_H

#include "train/data/tokenizer.h"
#include "train/model/config.h"

enum { CARRIED_FILES = 11 };

typedef struct carried {
    file_map config;               // config.json; zeroed: none
    file_map files[CARRIED_FILES]; // zeroed where there is none
    bool other_tokens;             // the run has another tokenizer than the checkpoint
} carried;

/* Maps the files of a checkpoint, except for those that `words` writes. A file that is mapped stays readable
 * even if it is replaced by a rename or removed. */
bool carried_open(carried *c, const char *checkpoint, const tokenizer *words, error *err);
void carried_close(carried *c); // a zeroed one is fine

/* Forgets the files, which depend on the tokenizer, because the run has another one. config.json stays. */
void carried_change_tokens(carried *c);

bool carried_has_tokenizer(const carried *c); // tokenizer.json

/* Writes the files, but not config.json, into a folder. */
bool carried_save(const carried *c, const char *folder, error *err);

#endif
