/* Start and end of the library, versions, and the way to a GPU. */
#include "double.h"

#include <string.h>

static int initialize(const char *function) {
    int code = begin_library(function);
    return code == OK ? finish(start_session()) : code;
}

EXPORT int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return initialize(__func__);
}

EXPORT int nvmlInit_v2(void) {
    return initialize(__func__);
}

EXPORT int nvmlShutdown(void) {
    int code = begin_library(__func__);
    return code == OK ? finish(end_session()) : code;
}

EXPORT const char *nvmlErrorString(int code) {
    switch (code) {
    case OK: return "no error";
    case UNINITIALIZED: return "the library was not initialized";
    case INVALID_ARGUMENT: return "an argument is invalid";
    case NOT_SUPPORTED: return "not supported";
    case GPU_IS_LOST: return "the GPU is lost";
    default: return "an error of the test double";
    }
}

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    int code = begin_system(__func__);
    return code == OK ? finish(give_text(version, length, config_in_use()->driver_version)) : code;
}

EXPORT int nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    int code = begin_system(__func__);
    return code == OK ? finish(give_text(version, length, config_in_use()->nvml_version)) : code;
}

static int cuda_version(const char *function, int *version) {
    int code = begin_system(function);
    if (code != OK) return code;
    *version = (int)config_in_use()->cuda_version;
    return finish(OK);
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version) {
    return cuda_version(__func__, version);
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    return cuda_version(__func__, version);
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    int code = begin_system(__func__);
    if (code != OK) return code;
    *count = 0;
    for (int i = 0; i < config_in_use()->gpu_count; i++)
        if (config_in_use()->gpus[i].parent < 0) ++*count;
    return finish(OK);
}

/* The GPUs stand before their MIG devices in the control file, so an index below the count is a whole GPU. */
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    int code = begin_system(__func__);
    if (code != OK) return code;
    struct config *config = config_in_use();
    if (index >= (unsigned)config->gpu_count) return finish(INVALID_ARGUMENT);
    if (config->gpus[index].parent >= 0) return finish(INVALID_ARGUMENT);
    *handle = handle_of((int)index);
    return finish(failure_of(__func__, &config->gpus[index]));
}

static int find_gpu(const char *function, const char *text, size_t offset, void **handle) {
    int code = begin_system(function);
    if (code != OK) return code;
    struct config *config = config_in_use();
    for (int i = 0; i < config->gpu_count; i++) {
        if (strcmp((const char *)&config->gpus[i] + offset, text) != 0) continue;
        *handle = handle_of(i);
        return finish(failure_of(function, &config->gpus[i]));
    }
    return finish(NOT_FOUND);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    return find_gpu(__func__, uuid, offsetof(struct gpu, uuid), handle);
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *pci_bus_id, void **handle) {
    return find_gpu(__func__, pci_bus_id, offsetof(struct gpu, pci_bus_id), handle);
}

/* Lets a test make sure that it talks to the double. */
EXPORT const int nvml_double_marker = 1;
