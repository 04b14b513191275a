// A stand-in for NCCL between threads or processes of a machine without GPUs: each message is a file in a folder that the
// communicator's id names. Sends and receives must be in a group, as of ranks that all send to all; one that does not find as many
// bytes as it asks for fails.
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, RANKS = 64, SECONDS = 60 };
typedef struct { char internal[128]; } Id;
typedef struct {
  Id id;
  int rank, size;
  // Messages so far, by peer.
  unsigned sent[RANKS], received[RANKS];
} Comm;
struct Receive {
  Comm *comm;
  int peer;
  void *at;
  size_t n;
};
// A group of this thread: how deep it is in, and what it will receive at its end.
static __thread int depth, waiting;
static __thread struct Receive receives[RANKS];

int ncclGetVersion(int *version) { return *version = 23000, SUCCESS; }
const char *ncclGetErrorString(int error) { return "an error of the stand-in NCCL"; }
int ncclGetUniqueId(Id *id) {
  memset(id, 0, sizeof *id);
  strcpy(id->internal, "/tmp/standin-nccl-XXXXXX");
  return mkdtemp(id->internal) ? SUCCESS : SYSTEM_ERROR;
}
int ncclCommInitRank(Comm **comm, int size, Id id, int rank) {
  if (size > RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  *comm = calloc(1, sizeof **comm);
  return (*comm)->id = id, (*comm)->rank = rank, (*comm)->size = size, SUCCESS;
}
// The folder goes with the last that leaves it.
int ncclCommAbort(Comm *comm) { return rmdir(comm->id.internal), free(comm), SUCCESS; }

static int put(Comm *comm, int peer, const void *from, size_t n) {
  char made[220], name[200];
  snprintf(name, sizeof name, "%s/%d-%d-%u", comm->id.internal, comm->rank, peer, comm->sent[peer]++);
  snprintf(made, sizeof made, "%s.made", name);
  FILE *file = fopen(made, "w");
  if (!file) return SYSTEM_ERROR;
  const size_t written = fwrite(from, 1, n, file);
  return fclose(file) || written != n || rename(made, name) ? SYSTEM_ERROR : SUCCESS;
}
static int take(Comm *comm, int peer, void *at, size_t n) {
  char name[200];
  struct stat found;
  snprintf(name, sizeof name, "%s/%d-%d-%u", comm->id.internal, peer, comm->rank, comm->received[peer]++);
  const time_t end = time(0) + SECONDS;
  while (stat(name, &found)) {
    if (time(0) > end) return SYSTEM_ERROR;
    sched_yield();
  }
  FILE *file = fopen(name, "r");
  if (!file) return SYSTEM_ERROR;
  const size_t got = fread(at, 1, n, file);
  fclose(file), unlink(name);
  return got == n && (size_t)found.st_size == n ? SUCCESS : INVALID_ARGUMENT;
}

// Only ncclFloat32 is here.
enum { FLOAT32 = 7 };
int ncclSend(const void *from, size_t n, int type, int peer, Comm *comm, void *stream) {
  if (type != FLOAT32 || peer < 0 || peer >= comm->size) return INVALID_ARGUMENT;
  return depth ? put(comm, peer, from, 4 * n) : INVALID_USAGE;
}
int ncclRecv(void *at, size_t n, int type, int peer, Comm *comm, void *stream) {
  if (type != FLOAT32 || peer < 0 || peer >= comm->size || waiting == RANKS) return INVALID_ARGUMENT;
  if (!depth) return INVALID_USAGE;
  return receives[waiting++] = (struct Receive){comm, peer, at, 4 * n}, SUCCESS;
}
int ncclGroupStart(void) { return depth++, SUCCESS; }
int ncclGroupEnd(void) {
  int result = depth ? SUCCESS : INVALID_USAGE;
  if (depth && --depth) return SUCCESS;
  for (int i = 0; i < waiting && !result; i++)
    result = take(receives[i].comm, receives[i].peer, receives[i].at, receives[i].n);
  return waiting = 0, result;
}
