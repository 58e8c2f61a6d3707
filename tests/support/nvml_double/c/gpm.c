/* Performance counters (GPM): a sample belongs to the GPU or MIG device that it was taken of. */
#include "double.h"

#include <stdlib.h>

struct sample {
    int index; /* in the control file; negative before it is taken */
};

struct support {
    unsigned version, supported;
};

struct metric {
    unsigned id, result;
    double value;
    const char *texts[3];
};

struct metrics {
    unsigned version, count;
    struct sample *older, *newer;
    struct metric items[];
};

EXPORT int nvmlGpmQueryDeviceSupport(void *device, struct support *support) {
    DEVICE_CALL(device);
    if (support->version != 1) return finish(VERSION_MISMATCH);
    support->supported = gpu->compute_major >= 9;
    return finish(OK);
}

EXPORT int nvmlGpmSampleAlloc(struct sample **sample) {
    int code = begin_system(__func__);
    if (code != OK) return code;
    *sample = malloc(sizeof **sample);
    (*sample)->index = -1;
    return finish(OK);
}

EXPORT int nvmlGpmSampleFree(struct sample *sample) {
    int code = begin_system(__func__);
    if (code != OK) return code;
    free(sample);
    return finish(OK);
}

EXPORT int nvmlGpmSampleGet(void *device, struct sample *sample) {
    DEVICE_CALL(device);
    if (gpu->parent >= 0) return finish(INVALID_ARGUMENT);
    if (gpu->activity_count == 0) return finish(NOT_SUPPORTED);
    sample->index = (int)(gpu - config_in_use()->gpus);
    return finish(OK);
}

EXPORT int nvmlGpmMigSampleGet(void *device, unsigned instance, struct sample *sample) {
    DEVICE_CALL(device);
    struct config *config = config_in_use();
    for (int i = 0; i < config->gpu_count; i++) {
        const struct gpu *part = &config->gpus[i];
        if (part->parent != gpu - config->gpus || part->gpu_instance != (long long)instance) continue;
        if (part->activity_count == 0) return finish(NOT_SUPPORTED);
        sample->index = i;
        return finish(OK);
    }
    return finish(NOT_FOUND);
}

EXPORT int nvmlGpmMetricsGet(struct metrics *metrics) {
    int code = begin_system(__func__);
    if (code != OK) return code;
    if (metrics->version != 1) return finish(VERSION_MISMATCH);
    if (metrics->older == metrics->newer || metrics->older->index < 0 ||
        metrics->older->index != metrics->newer->index)
        return finish(INVALID_ARGUMENT);
    const struct gpu *gpu = &config_in_use()->gpus[metrics->newer->index];
    for (unsigned i = 0; i < metrics->count; i++) {
        struct metric *wanted = &metrics->items[i];
        wanted->result = NOT_SUPPORTED;
        for (int j = 0; j < gpu->activity_count; j++) {
            if (gpu->activities[j].metric != wanted->id) continue;
            wanted->result = OK;
            wanted->value = gpu->activities[j].value;
        }
    }
    return finish(OK);
}
