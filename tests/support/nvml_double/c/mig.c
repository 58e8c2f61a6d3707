/*
 * MIG instances that are made and destroyed, with the profiles of an H100 of 80 GB.
 *
 * Those of the control file are there at first. What became of them is in a file beside it, for all processes, until the file is
 * gone: a boot. A GPU instance has at most one compute instance, of all its slices.
 */
#include "double.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { MAX_INSTANCES = 56, NO_MIG_INDEX = -1 };

struct profile {
    unsigned number, id, slices, size, count;
    const char *name, *starts;
};

static const struct profile profiles[] = {
    {0, 19, 1, 1, 7, "1g.10gb", "0123456"}, {9, 15, 1, 2, 4, "1g.20gb", "0246"}, {1, 14, 2, 2, 3, "2g.20gb", "024"},
    {2, 9, 3, 4, 2, "3g.40gb", "04"},       {3, 5, 4, 4, 1, "4g.40gb", "0"},     {4, 0, 7, 8, 1, "7g.80gb", "0"},
};
enum { PROFILES = sizeof profiles / sizeof profiles[0] };

struct instance {
    int gpu;
    unsigned id;
    const struct profile *profile;
    unsigned start;
    int filled; /* whether it has its compute instance */
    int place;  /* of its MIG device among all GPUs; never taken twice */
    char uuid[96];
};

static struct {
    int next;         /* free place */
    unsigned managed; /* GPUs whose instances are these, and not those of the control file: a bit for each */
    int count;
    struct instance items[MAX_INSTANCES];
} state;

static const char *state_path(void) {
    static char path[MAX_PATH + 32];
    snprintf(path, sizeof path, "%s.mig", getenv("NVML_DOUBLE_CONFIG"));
    return path;
}

static const struct profile *profile_of(const char *name) {
    for (int i = 0; i < PROFILES; i++)
        if (strcmp(profiles[i].name, name) == 0) return &profiles[i];
    return NULL;
}

static const struct profile *profile_with(unsigned id) {
    for (int i = 0; i < PROFILES; i++)
        if (profiles[i].id == id) return &profiles[i];
    return NULL;
}

static bool read_state(void) {
    memset(&state, 0, sizeof state);
    FILE *file = fopen(state_path(), "r");
    if (file == NULL) return false;
    bool sound = fscanf(file, "%d %u", &state.next, &state.managed) == 2;
    char name[32];
    struct instance one;
    while (sound && fscanf(file, "%d %u %31s %u %d %d %95s", &one.gpu, &one.id, name, &one.start, &one.filled,
                           &one.place, one.uuid) == 7) {
        one.profile = profile_of(name);
        state.items[state.count++] = one;
    }
    fclose(file);
    return sound;
}

/* All processes read the control file anew, and with it this, as its time is another. */
static int write_state(void) {
    char draft[MAX_PATH + 40];
    snprintf(draft, sizeof draft, "%s.new", state_path());
    FILE *file = fopen(draft, "w");
    if (file == NULL) return UNKNOWN_ERROR;
    fprintf(file, "%d %u\n", state.next, state.managed);
    for (int i = 0; i < state.count; i++) {
        const struct instance *one = &state.items[i];
        fprintf(file, "%d %u %s %u %d %d %s\n", one->gpu, one->id, one->profile->name, one->start, one->filled,
                one->place, one->uuid);
    }
    fclose(file);
    struct timespec now[2];
    clock_gettime(CLOCK_REALTIME, &now[0]);
    now[1] = now[0];
    bool done = rename(draft, state_path()) == 0;
    return done && utimensat(AT_FDCWD, getenv("NVML_DOUBLE_CONFIG"), now, 0) == 0 ? OK : UNKNOWN_ERROR;
}

static struct gpu new_device(const struct gpu *whole, const struct instance *one) {
    struct gpu part = *whole;
    snprintf(part.name, sizeof part.name, "%.60s MIG %s", whole->name, one->profile->name);
    strcpy(part.uuid, one->uuid);
    part.parent = one->gpu;
    part.mig_mode = part.mig_mode_pending = 0;
    part.gpu_instance = one->id;
    part.compute_instance = 0;
    part.memory_total = part.memory_free = whole->memory_total / 8 * one->profile->size;
    part.memory_used = part.memory_reserved = 0;
    part.process_count = part.rules.count = 0;
    return part;
}

static void retire(struct gpu *part, int parent) {
    part->parent = parent;
    part->mig_index = NO_MIG_INDEX;
    part->uuid[0] = part->pci_bus_id[0] = '\0';
}

void add_instances(struct config *config) {
    if (!read_state()) return;
    int of_file = config->gpu_count;
    for (int i = 0; i < of_file; i++)
        if (config->gpus[i].parent >= 0 && state.managed >> config->gpus[i].parent & 1)
            config->gpus[i].mig_index = NO_MIG_INDEX;
    for (int i = of_file; i < state.next; i++) retire(&config->gpus[i], 0);
    if (state.next > of_file) config->gpu_count = state.next;
    int index[MAX_GPUS] = {0};
    for (int i = 0; i < state.count; i++) {
        const struct instance *one = &state.items[i];
        if (!one->filled) continue;
        struct gpu *part = &config->gpus[one->place];
        if (one->place >= of_file) *part = new_device(&config->gpus[one->gpu], one);
        part->mig_index = index[one->gpu]++;
    }
    for (int i = 0; i < of_file; i++)
        if (config->gpus[i].parent >= 0 && config->gpus[i].mig_index == NO_MIG_INDEX)
            retire(&config->gpus[i], (int)config->gpus[i].parent);
}

static bool is_free(int gpu, unsigned start, unsigned size) {
    for (int i = 0; i < state.count; i++) {
        const struct instance *one = &state.items[i];
        if (one->gpu == gpu && start < one->start + one->profile->size && one->start < start + size) return false;
    }
    return true;
}

/* The instances of a GPU, from now on in the state: those of the control file where nothing was changed yet. */
static void load(int gpu) {
    struct config *config = config_in_use();
    if (!read_state()) state.next = config->gpu_count;
    if (state.managed >> gpu & 1) return;
    state.managed |= 1u << gpu;
    for (int i = 0; i < config->gpu_count; i++) {
        const struct gpu *part = &config->gpus[i];
        const char *mark = strstr(part->name, "MIG ");
        if (part->parent != gpu || part->mig_index < 0 || mark == NULL) continue;
        struct instance one = {gpu, (unsigned)part->gpu_instance, profile_of(mark + 4), 0, 1, i, ""};
        if (one.profile == NULL) continue;
        strcpy(one.uuid, part->uuid);
        for (const char *start = one.profile->starts; *start != '\0'; start++) {
            one.start = (unsigned)(*start - '0');
            if (is_free(gpu, one.start, one.profile->size)) break;
        }
        state.items[state.count++] = one;
    }
}

/* A handle of an instance is that of its GPU, and its id. */
static void *instance_handle(const struct instance *one) {
    return (void *)((uintptr_t)handle_of(one->gpu) << 8 | (one->id + 1));
}

static int begin_instance(const char *function, void *handle, struct instance **found) {
    uintptr_t value = (uintptr_t)handle;
    void *device = (void *)(value >> 8);
    struct gpu *gpu;
    int code = begin_device(function, device, &gpu);
    if (code != OK) return code;
    load(index_of(device));
    for (int i = 0; i < state.count; i++) {
        *found = &state.items[i];
        if ((*found)->gpu == index_of(device) && (*found)->id + 1 == (value & 0xff)) return OK;
    }
    return finish(INVALID_ARGUMENT);
}

#define INSTANCE_CALL(handle) \
    struct instance *one; \
    int code = begin_instance(__func__, handle, &one); \
    if (code != OK) return code

#define MIG_CALL(device) \
    DEVICE_CALL(device); \
    if (gpu->mig_mode != 1 || gpu->parent >= 0) return finish(NOT_SUPPORTED)

struct profile_info {
    unsigned version, id, peer_to_peer, slices, instances, processors, copy, decoders, encoders, jpeg, ofa;
    unsigned long long memory_mib;
    char name[96];
};

EXPORT int nvmlDeviceGetGpuInstanceProfileInfoV(void *device, unsigned number, struct profile_info *info) {
    MIG_CALL(device);
    for (int i = 0; i < PROFILES; i++) {
        const struct profile *found = &profiles[i];
        if (found->number != number) continue;
        info->id = found->id;
        info->slices = found->slices;
        info->instances = found->count;
        snprintf(info->name, sizeof info->name, "MIG %s", found->name);
        return finish(OK);
    }
    return finish(NOT_SUPPORTED);
}

struct placement {
    unsigned start, size;
};

EXPORT int nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *device, unsigned id, struct placement *places,
                                                         unsigned *count) {
    MIG_CALL(device);
    const struct profile *profile = profile_with(id);
    if (profile == NULL) return finish(INVALID_ARGUMENT);
    *count = (unsigned)strlen(profile->starts);
    for (unsigned i = 0; places != NULL && i < *count; i++)
        places[i] = (struct placement){(unsigned)(profile->starts[i] - '0'), profile->size};
    return finish(OK);
}

EXPORT int nvmlDeviceGetGpuInstances(void *device, unsigned id, void **instances, unsigned *count) {
    MIG_CALL(device);
    load(index_of(device));
    *count = 0;
    for (int i = 0; i < state.count; i++)
        if (state.items[i].gpu == index_of(device) && state.items[i].profile->id == id)
            instances[(*count)++] = instance_handle(&state.items[i]);
    return finish(OK);
}

struct instance_info {
    void *device;
    unsigned id, profile;
    struct placement placement;
};

EXPORT int nvmlGpuInstanceGetInfo(void *instance, struct instance_info *info) {
    INSTANCE_CALL(instance);
    *info = (struct instance_info){handle_of(one->gpu), one->id, one->profile->id, {one->start, one->profile->size}};
    return finish(OK);
}

struct compute_info {
    unsigned version, id, slices, instances, processors, copy, decoders, encoders, jpeg, ofa;
    char name[96];
};

static unsigned compute_slices(unsigned number) {
    return number < 4 ? number + 1 : number == 4 ? 7 : 0;
}

EXPORT int nvmlGpuInstanceGetComputeInstanceProfileInfoV(void *instance, unsigned number, unsigned engines,
                                                         struct compute_info *info) {
    INSTANCE_CALL(instance);
    unsigned slices = compute_slices(number);
    if (slices == 0 || slices > one->profile->slices || engines != 0) return finish(NOT_SUPPORTED);
    info->id = number;
    info->slices = slices;
    info->instances = one->profile->slices / slices;
    return finish(OK);
}

EXPORT int nvmlGpuInstanceGetComputeInstances(void *instance, unsigned id, void **instances, unsigned *count) {
    INSTANCE_CALL(instance);
    *count = one->filled && compute_slices(id) == one->profile->slices;
    if (*count > 0) instances[0] = instance;
    return finish(OK);
}

EXPORT int nvmlDeviceCreateGpuInstanceWithPlacement(void *device, unsigned id, const struct placement *at,
                                                    void **instance) {
    MIG_CALL(device);
    int place = index_of(device);
    load(place);
    const struct profile *profile = profile_with(id);
    if (profile == NULL || at->size != profile->size) return finish(INVALID_ARGUMENT);
    if (at->start > 7 || strchr(profile->starts, '0' + (int)at->start) == NULL) return finish(INVALID_ARGUMENT);
    if (!is_free(place, at->start, at->size) || state.next >= MAX_GPUS) return finish(INSUFFICIENT_RESOURCES);
    struct instance one = {place, 0, profile, at->start, 0, state.next++, ""};
    for (int i = 0; i < state.count; i++)
        if (state.items[i].gpu == place && state.items[i].id >= one.id) one.id = state.items[i].id + 1;
    snprintf(one.uuid, sizeof one.uuid, "MIG-00000000-0000-5000-8000-%012d", one.place);
    state.items[state.count++] = one;
    *instance = instance_handle(&one);
    return finish(write_state());
}

EXPORT int nvmlGpuInstanceCreateComputeInstance(void *instance, unsigned id, void **made) {
    INSTANCE_CALL(instance);
    if (compute_slices(id) != one->profile->slices) return finish(NOT_SUPPORTED);
    if (one->filled) return finish(INSUFFICIENT_RESOURCES);
    one->filled = 1;
    *made = instance;
    return finish(write_state());
}

EXPORT int nvmlComputeInstanceDestroy(void *instance) {
    INSTANCE_CALL(instance);
    if (!one->filled) return finish(INVALID_ARGUMENT);
    if (config_in_use()->gpus[one->place].process_count > 0) return finish(IN_USE);
    one->filled = 0;
    return finish(write_state());
}

EXPORT int nvmlGpuInstanceDestroy(void *instance) {
    INSTANCE_CALL(instance);
    if (one->filled) return finish(IN_USE);
    *one = state.items[--state.count];
    return finish(write_state());
}
