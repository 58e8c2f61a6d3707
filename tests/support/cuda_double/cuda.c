/* A double of the CUDA driver library with one GPU, whose memory is that of the process. $CUDA_DOUBLE says how it misbehaves:
 * "wrong UUID" changes a byte in each copy within that GPU's memory, "lost UUID" fails these copies, "hang UUID" never returns
 * from them, "init CODE" fails the start. */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <stdint.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, STUB_LIBRARY = 34, NO_DEVICE = 100, ECC_UNCORRECTABLE = 214 };
static const size_t MEMORY = (size_t)24 << 20;

static int misbehaves(const char *how) {
  const char *said = getenv("CUDA_DOUBLE"), *visible = getenv("CUDA_VISIBLE_DEVICES");
  size_t length = strlen(how);
  return said && visible && !strncmp(said, how, length) && said[length] == ' ' && !strcmp(said + length + 1, visible);
}

EXPORT int cuInit(unsigned flags) {
  const char *said = getenv("CUDA_DOUBLE");
  (void)flags;
  return said && !strncmp(said, "init ", 5) ? atoi(said + 5) : SUCCESS;
}

EXPORT int cuGetErrorName(int code, const char **name) {
  *name = code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : code == ECC_UNCORRECTABLE ? "CUDA_ERROR_ECC_UNCORRECTABLE" : NULL;
  return *name ? SUCCESS : 1;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = &misbehaves;
  return device == 0 ? SUCCESS : NO_DEVICE;
}

EXPORT int cuCtxSetCurrent(void *context) { return context == &misbehaves ? SUCCESS : 201; }

EXPORT int cuCtxSynchronize(void) { return SUCCESS; }

EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  *free_bytes = *total = MEMORY;
  return SUCCESS;
}

EXPORT int cuMemAlloc_v2(uint64_t *memory, size_t size) {
  if (size > MEMORY) return OUT_OF_MEMORY;
  *memory = (uint64_t)(uintptr_t)malloc(size);
  return SUCCESS;
}

EXPORT int cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
  *memory = flags ? NULL : malloc(size);
  return *memory ? SUCCESS : 1;
}

EXPORT int cuMemsetD32_v2(uint64_t memory, unsigned word, size_t count) {
  unsigned *words = (unsigned *)(uintptr_t)memory;
  for (size_t at = 0; at < count; at++) words[at] = word;
  return SUCCESS;
}

EXPORT int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t size) {
  memcpy((void *)(uintptr_t)target, source, size);
  return SUCCESS;
}

EXPORT int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t size) {
  memcpy(target, (void *)(uintptr_t)source, size);
  return SUCCESS;
}

EXPORT int cuMemcpyDtoD_v2(uint64_t target, uint64_t source, size_t size) {
  if (misbehaves("lost")) return ECC_UNCORRECTABLE;
  while (misbehaves("hang")) pause();
  memcpy((void *)(uintptr_t)target, (void *)(uintptr_t)source, size);
  if (misbehaves("wrong")) ((unsigned char *)(uintptr_t)target)[4711] ^= 1;
  return SUCCESS;
}

EXPORT int cuDeviceGetPCIBusId(char *text, int length, int device) {
  return snprintf(text, (size_t)length, "0000:1B:00.%d", device) < length ? SUCCESS : 1;
}
