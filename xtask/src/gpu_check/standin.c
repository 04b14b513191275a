// A stand-in for the CUDA driver on a machine without a GPU: device memory is host memory of exact size, a launch runs the
// host build of the kernel, and everything that would make the host wait is counted. What it does not have says so.
//
// In a dry run (standin_dry) launches do nothing and all memory is zero: it shows what a program asks of the driver, in
// which order and where it waits, whatever kernels it uses.
//
// STANDIN_FAULT sows a fault into every launch of a step: swapped-arguments, swapped-pointers, wrong-stride, off-by-one.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef unsigned long long Pointer;
typedef void *Handle;
typedef void (*Kernel)(const unsigned *grid, unsigned threads, unsigned seen, void **args);
struct Function {
  Kernel kernel;
  char name[200];
};

// Launches; waits for all that was asked for; waits for one event; pinned buffers.
static unsigned long long counts[4];
static int dry;
static Handle kernels;
static __thread Handle current;

unsigned long long standin_count(int which) { return counts[which]; }
void standin_kernels(const char *path) {
  kernels = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!kernels) fprintf(stderr, "stand-in: %s\n", dlerror());
}
void standin_dry(void) { dry = 1; }
static Result waits(void) { return counts[1]++, 0; }

Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int *version) { return *version = 13040, 0; }
Result cuDeviceGetCount(int *n) { return *n = 1, 0; }
Result cuDeviceGet(int *device, int ordinal) { return *device = 0, ordinal ? 101 : 0; }
Result cuDeviceGetName(char *name, int n, int device) { return snprintf(name, n, "stand-in"), 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
  // Of compute capability 8.0, with memory pools.
  return *value = attribute == 75 ? 8 : attribute == 115 ? 1 : 0, 0;
}
Result cuDevicePrimaryCtxRetain(Handle *context, int device) { return *context = (Handle)0x1000, 0; }
Result cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
Result cuCtxGetCurrent(Handle *context) { return *context = current, 0; }
Result cuCtxSetCurrent(Handle context) { return current = context, 0; }
Result cuCtxSynchronize(void) { return waits(); }
Result cuStreamCreate(Handle *stream, unsigned flags) { return *stream = (Handle)0x2000, 0; }
Result cuStreamDestroy_v2(Handle stream) { return 0; }
Result cuStreamSynchronize(Handle stream) { return waits(); }
Result cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) { return 0; }
Result cuStreamIsCapturing(Handle stream, int *status) { return *status = 0, 0; }
Result cuEventCreate(Handle *event, unsigned flags) { return *event = malloc(1), 0; }
Result cuEventDestroy_v2(Handle event) { return free(event), 0; }
Result cuEventRecord(Handle event, Handle stream) { return 0; }
Result cuEventSynchronize(Handle event) { return counts[2]++, 0; }
Result cuEventQuery(Handle event) { return 0; }

Result cuMemAlloc_v2(Pointer *at, size_t n) {
  return *at = (Pointer)(uintptr_t)(dry ? calloc(1, n) : malloc(n)), n ? 0 : 1;
}
Result cuMemHostAlloc(void **at, size_t n, unsigned flags) { return *at = malloc(n), counts[3]++, 0; }
Result cuMemFreeHost(void *at) { return free(at), 0; }
Result cuMemAllocAsync(Pointer *at, size_t n, Handle stream) { return cuMemAlloc_v2(at, n); }
Result cuMemFreeAsync(Pointer at, Handle stream) { return free((void *)(uintptr_t)at), 0; }
Result cuMemFree_v2(Pointer at) { return free((void *)(uintptr_t)at), waits(); }
// Asked for by NVRTC, which does without it.
Result cuGetExportTable(const void **table, const void *id) { return 801; }
Result cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t n, Handle stream) {
  return memcpy((void *)(uintptr_t)to, from, n), 0;
}
Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t n, Handle stream) {
  return memcpy(to, (void *)(uintptr_t)from, n), waits();
}
Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t n, Handle stream) {
  return memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, n), 0;
}
Result cuMemsetD8Async(Pointer at, unsigned char value, size_t n, Handle stream) {
  return memset((void *)(uintptr_t)at, value, n), 0;
}

Result cuModuleLoadData(Handle *module, const void *image) { return *module = strdup(image), 0; }
Result cuModuleUnload(Handle module) { return free(module), 0; }
// A kernel must be an entry of the PTX that was loaded, and there must be a host build of it.
Result cuModuleGetFunction(Handle *function, Handle module, const char *name) {
  char text[300];
  snprintf(text, sizeof text, ".entry %s(", name);
  if (!dry && !strstr(module, text)) return fprintf(stderr, "stand-in: no entry %s in the PTX\n", name), 500;
  snprintf(text, sizeof text, "host_%s", name);
  struct Function *found = malloc(sizeof *found);
  found->kernel = kernels ? (Kernel)dlsym(kernels, text) : 0;
  snprintf(found->name, sizeof found->name, "%s", name);
  if (!dry && !found->kernel) return fprintf(stderr, "stand-in: no host build of %s\n", name), 500;
  return *function = found, 0;
}

Result cuLaunchKernel(Handle handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, Handle stream, void **args, void **extra) {
  if (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024 || gy > 65535 || gz > 65535) return 1;
  counts[0]++;
  if (dry) return 0;
  const struct Function *function = handle;
  const unsigned grid[] = {gx, gy};
  const char *end = strrchr(function->name, '_'), *fault = getenv("STANDIN_FAULT");
  unsigned seen = bx;
  if (fault && end && !strcmp(end, "_step")) {
    uint64_t *row = *(uint64_t **)args[1];
    if (!strcmp(fault, "swapped-pointers")) {
      const uint64_t x = row[0];
      row[0] = row[1], row[1] = x;
    }
    if (!strcmp(fault, "off-by-one")) row[3]--;
    if (!strcmp(fault, "wrong-stride")) seen = bx - 1;
    if (!strcmp(fault, "swapped-arguments")) {
      void *swapped[] = {args[0], args[2], args[1]};
      return function->kernel(grid, bx, seen, swapped), 0;
    }
  }
  return function->kernel(grid, bx, seen, args), 0;
}

Result cuGetErrorName(int error, const char **name) { return *name = "STANDIN_ERROR", 0; }
Result cuGetErrorString(int error, const char **text) { return *text = "an error of the stand-in driver", 0; }
