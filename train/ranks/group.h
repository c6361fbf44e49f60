/* The ranks of a run as processes: they meet at rank 0 (TCP), agree on their settings, and end together. A
 * thread of each rank watches the others: if one fails, ends, or makes no progress, every rank's process ends
 * with the status of the failure, also one that waits in a collective. One message names the rank and the
 * cause; rank 0 writes it, or, where rank 0 is the cause, rank 1. Under `smoe train --gpus` it is any rank,
 * or the process that started them. A process that rank 0 does not want says so itself, and the others go on.
 */
#ifndef TRAIN_GROUP_H
#define TRAIN_GROUP_H

#include "train/ranks/place.h"

#include <stddef.h>

typedef struct group group;

enum { GROUP_KEY = 128 }; // bytes of the key, by which a comm's ranks find each other

/* Connects to the others. From then on the group is watched. peer_timeout: seconds without progress after
 * which a rank counts as hung, once they have the key; before, seconds without a sign of life. `name` begins
 * the messages. */
bool group_connect(group **g, const rank_place *place, double peer_timeout, const char *name, error *err);
void group_close(group *g); // the rank is done; NULL is fine

int group_rank(const group *g);
int group_ranks(const group *g);
int group_local(const group *g);

/* Rank 0 compares `settings` (lines of text) with its own. Where they differ, all ranks end with an error
 * that names the rank and the first line that differs. */
bool group_agree(group *g, const char *settings, error *err);

/* Copies rank 0's key to all. */
void group_share_key(group *g, unsigned char key[GROUP_KEY]);

/* This rank has made progress; it writes files now, or has done, meanwhile no rank counts as hung. NULL is
 * fine. */
void group_progress(group *g);
void group_writes(group *g, bool writes);

/* Tells the others why this rank fails and ends the process with the error's status. Rank 0 writes the
 * message. To be called before a device is closed: it may wait for ranks that never come. */
_Noreturn void group_fail(group *g, const error *why);

#endif
