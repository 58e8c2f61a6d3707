/* Power, in mW: what is drawn is what the load would draw, and no more than the limit in force. A limit that was set is in a file
 * beside the control file, for all processes, until the file is gone: a boot. */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>

enum { LOWEST = 187, HIGHEST = 188, DEFAULT = 189 };

static const char *limit_path(const struct gpu *gpu) {
    static char path[MAX_PATH + 32];
    snprintf(path, sizeof path, "%s.limit.%d", getenv("NVML_DOUBLE_CONFIG"), (int)(gpu - config_in_use()->gpus));
    return path;
}

static long long limit_in_force(const struct gpu *gpu, long long otherwise) {
    FILE *file = fopen(limit_path(gpu), "r");
    long long limit = otherwise;
    if (file != NULL) {
        if (fscanf(file, "%lld", &limit) != 1) limit = otherwise;
        fclose(file);
    }
    return limit;
}

static int give(unsigned *value, const struct gpu *gpu, long long reading) {
    if (reading < 0 || gpu->parent >= 0) return finish(NOT_SUPPORTED);
    *value = (unsigned)reading;
    return finish(OK);
}

static long long field_of(const struct gpu *gpu, unsigned id) {
    for (int index = 0; index < gpu->field_count; index++)
        if (gpu->fields[index].id == id) return (long long)gpu->fields[index].number;
    return -1;
}

EXPORT int nvmlDeviceGetPowerUsage(void *device, unsigned *value) {
    DEVICE_CALL(device);
    long long limit = limit_in_force(gpu, -1);
    return give(value, gpu, limit >= 0 && limit < gpu->power_mw ? limit : gpu->power_mw);
}

EXPORT int nvmlDeviceGetPowerManagementLimit(void *device, unsigned *value) {
    DEVICE_CALL(device);
    return give(value, gpu, limit_in_force(gpu, gpu->power_limit_mw));
}

EXPORT int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *value) {
    DEVICE_CALL(device);
    return give(value, gpu, limit_in_force(gpu, gpu->enforced_power_limit_mw));
}

EXPORT int nvmlDeviceGetPowerManagementDefaultLimit(void *device, unsigned *value) {
    DEVICE_CALL(device);
    return give(value, gpu, field_of(gpu, DEFAULT));
}

EXPORT int nvmlDeviceGetPowerManagementLimitConstraints(void *device, unsigned *lowest, unsigned *highest) {
    DEVICE_CALL(device);
    long long low = field_of(gpu, LOWEST), high = field_of(gpu, HIGHEST);
    if (low < 0 || high < 0 || gpu->parent >= 0) return finish(NOT_SUPPORTED);
    *lowest = (unsigned)low;
    *highest = (unsigned)high;
    return finish(OK);
}

EXPORT int nvmlDeviceSetPowerManagementLimit(void *device, unsigned limit) {
    DEVICE_CALL(device);
    if (gpu->parent >= 0) return finish(NOT_SUPPORTED);
    if (limit < field_of(gpu, LOWEST) || limit > field_of(gpu, HIGHEST)) return finish(INVALID_ARGUMENT);
    char draft[MAX_PATH + 40];
    snprintf(draft, sizeof draft, "%s.new", limit_path(gpu));
    FILE *file = fopen(draft, "w");
    if (file == NULL) return finish(UNKNOWN_ERROR);
    fprintf(file, "%u", limit);
    fclose(file);
    return finish(rename(draft, limit_path(gpu)) == 0 ? OK : UNKNOWN_ERROR);
}
