/* Answers that are lists: processes, field values, MIG devices. */
#include "double.h"

#include <string.h>
#include <time.h>

struct process_record {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};

/*
 * The caller's room is counted in records of its own size. Some drivers put the records of the v3 calls
 * further apart than callers expect (`record_bytes`); what does not fit into the room then is not written.
 */
static int give_processes(const struct gpu *gpu, enum process_kind kind, size_t distance, unsigned *room,
                          char *place) {
    unsigned found = 0;
    for (int i = 0; i < gpu->process_count; i++) found += gpu->processes[i].kind == kind;
    unsigned given_room = *room;
    *room = found;
    if (found > given_room) return finish(INSUFFICIENT_SIZE);
    size_t bytes = given_room * sizeof(struct process_record), at = 0;
    for (int i = 0; i < gpu->process_count; i++) {
        const struct process *process = &gpu->processes[i];
        if (process->kind != kind || at + sizeof(struct process_record) > bytes) continue;
        struct process_record record = {process->pid, process->used_bytes, process->gpu_instance,
                                        process->compute_instance};
        memcpy(place + at, &record, sizeof record);
        at += distance;
    }
    return finish(OK);
}

#define PROCESS_LIST(FUNCTION, KIND, DISTANCE) \
    EXPORT int FUNCTION(void *device, unsigned *room, void *records) { \
        DEVICE_CALL(device); \
        return give_processes(gpu, KIND, (size_t)(DISTANCE), room, records); \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE, sizeof(struct process_record))
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE, config_in_use()->record_bytes)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS, sizeof(struct process_record))
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS, config_in_use()->record_bytes)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS, config_in_use()->record_bytes)

struct process_use {
    unsigned pid;
    unsigned long long timestamp_us;
    unsigned sm, memory, encoder, decoder;
};

/* One sample of each process, of now: newer than any that the caller has seen. */
EXPORT int nvmlDeviceGetProcessUtilization(void *device, struct process_use *samples, unsigned *room,
                                           unsigned long long last_seen) {
    DEVICE_CALL(device);
    if (gpu->parent >= 0 || gpu->mig_mode == 1) return finish(NOT_SUPPORTED);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long moment = (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
    unsigned found = 0, given_room = *room;
    for (int i = 0; i < gpu->process_count; i++) found += gpu->processes[i].sm_percent >= 0;
    *room = found;
    if (found == 0 || moment <= last_seen) return finish(NOT_FOUND);
    if (samples == NULL || given_room < found) return finish(INSUFFICIENT_SIZE);
    for (int i = 0; i < gpu->process_count; i++) {
        const struct process *process = &gpu->processes[i];
        if (process->sm_percent < 0) continue;
        *samples++ = (struct process_use){process->pid, moment, (unsigned)process->sm_percent,
                                          (unsigned)process->memory_percent, (unsigned)process->encoder_percent,
                                          (unsigned)process->decoder_percent};
    }
    return finish(OK);
}

struct field_value {
    unsigned id, scope;
    long long timestamp_us, latency_us;
    unsigned type, result;
    union {
        double real;
        unsigned long long number;
    } value;
};

static void give_field(const struct gpu *gpu, struct field_value *value) {
    value->result = NOT_SUPPORTED;
    for (int i = 0; i < gpu->field_count; i++) {
        const struct field *field = &gpu->fields[i];
        if (field->id != value->id) continue;
        value->result = OK;
        value->type = field->type;
        if (field->type == 0) value->value.real = field->real;
        else value->value.number = field->number;
    }
}

EXPORT int nvmlDeviceGetFieldValues(void *device, int count, struct field_value *values) {
    DEVICE_CALL(device);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++) {
        values[i].timestamp_us = now.tv_sec * 1000000LL + now.tv_nsec / 1000;
        give_field(gpu, &values[i]);
    }
    return finish(OK);
}

EXPORT int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    DEVICE_CALL(device);
    if (gpu->mig_mode < 0 || gpu->parent >= 0) return finish(NOT_SUPPORTED);
    *current = (unsigned)gpu->mig_mode;
    *pending = (unsigned)gpu->mig_mode_pending;
    return finish(OK);
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    DEVICE_CALL(device);
    *count = (unsigned)(gpu->max_mig_devices < 0 ? 0 : gpu->max_mig_devices);
    return finish(OK);
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **mig_device) {
    DEVICE_CALL(device);
    struct config *config = config_in_use();
    for (int i = 0; i < config->gpu_count; i++) {
        const struct gpu *part = &config->gpus[i];
        if (part->parent != gpu - config->gpus || part->mig_index != (long long)index) continue;
        *mig_device = handle_of(i);
        return finish(OK);
    }
    return finish(NOT_FOUND);
}

EXPORT int nvmlDeviceIsMigDeviceHandle(void *device, unsigned *is_mig_device) {
    DEVICE_CALL(device);
    *is_mig_device = gpu->parent >= 0;
    return finish(OK);
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *mig_device, void **device) {
    DEVICE_CALL(mig_device);
    if (gpu->parent < 0) return finish(INVALID_ARGUMENT);
    *device = handle_of((int)gpu->parent);
    return finish(OK);
}

static int give_instance(long long instance, unsigned *id) {
    if (instance < 0) return finish(NOT_SUPPORTED);
    *id = (unsigned)instance;
    return finish(OK);
}

EXPORT int nvmlDeviceGetGpuInstanceId(void *device, unsigned *id) {
    DEVICE_CALL(device);
    return give_instance(gpu->gpu_instance, id);
}

EXPORT int nvmlDeviceGetComputeInstanceId(void *device, unsigned *id) {
    DEVICE_CALL(device);
    return give_instance(gpu->compute_instance, id);
}
