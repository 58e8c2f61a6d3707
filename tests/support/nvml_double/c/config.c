/*
 * The control file: one statement a line.
 *
 *   system KEY VALUE                       driver_version, nvml_version, cuda_version, generation, ...
 *   system rule FUNCTION CODE DELAY HOLD   for calls that name no GPU; HOLD is a path, or - for none
 *   gpu INDEX KEY VALUE                    name, uuid, and the numbers of GPU_NUMBERS
 *   gpu INDEX rule FUNCTION CODE DELAY HOLD
 *   gpu INDEX process KIND PID BYTES GPU_INSTANCE COMPUTE_INSTANCE SM MEMORY
 *   gpu INDEX field ID TYPE VALUE
 *   gpu INDEX activity METRIC VALUE        of GPM
 *   gpu INDEX nvlink PEER                  the next link; PEER is a GPU, or -1 for a switch
 *   event SEQUENCE GPU TYPE DATA
 */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct key {
    const char *name;
    size_t offset;
    size_t length; /* of a text; 0 for a number */
};

static const struct key system_keys[] = {
    {"driver_version", offsetof(struct config, driver_version), 80},
    {"nvml_version", offsetof(struct config, nvml_version), 80},
    {"cuda_version", offsetof(struct config, cuda_version), 0},
    {"generation", offsetof(struct config, generation), 0},
    {"driver_lock", offsetof(struct config, driver_lock), 0},
    {"moving", offsetof(struct config, moving), 0},
    {"busy_us", offsetof(struct config, busy_us), 0},
    {"record_bytes", offsetof(struct config, record_bytes), 0},
    {NULL, 0, 0},
};

static const struct key gpu_keys[] = {
    {"name", offsetof(struct gpu, name), 96},
    {"uuid", offsetof(struct gpu, uuid), 96},
    {"pci_bus_id", offsetof(struct gpu, pci_bus_id), 32},
    {"serial", offsetof(struct gpu, serial), 30},
    {"vbios", offsetof(struct gpu, vbios), 32},
#define X(member) {#member, offsetof(struct gpu, member), 0},
    GPU_NUMBERS(X)
#undef X
    {NULL, 0, 0},
};

static void complain(const char *line) {
    fprintf(stderr, "nvml double: cannot read the line: %s\n", line);
    abort();
}

static void set_key(const struct key *keys, void *object, const char *name, const char *value) {
    for (; keys->name != NULL; keys++) {
        if (strcmp(keys->name, name) != 0) continue;
        char *place = (char *)object + keys->offset;
        if (keys->length > 0) snprintf(place, keys->length, "%s", value);
        else *(long long *)place = strtoll(value, NULL, 10);
        return;
    }
    complain(name);
}

static void add_rule(struct rules *rules, const char *text) {
    if (rules->count == MAX_RULES) complain(text);
    struct rule *rule = &rules->items[rules->count++];
    if (sscanf(text, "%63s %d %511[^\n]", rule->function, &rule->code, rule->hold) != 3)
        complain(text);
    if (strcmp(rule->hold, "-") == 0) rule->hold[0] = '\0';
}

static void add_process(struct gpu *gpu, const char *text) {
    if (gpu->process_count == MAX_PROCESSES) complain(text);
    struct process *process = &gpu->processes[gpu->process_count++];
    int kind;
    if (sscanf(text, "%d %u %llu %u %u %d %d %d %d", &kind, &process->pid, &process->used_bytes, &process->gpu_instance,
               &process->compute_instance, &process->sm_percent, &process->memory_percent,
               &process->encoder_percent, &process->decoder_percent) != 9)
        complain(text);
    process->kind = (enum process_kind)kind;
}

static void add_field(struct gpu *gpu, const char *text) {
    if (gpu->field_count == MAX_FIELDS) complain(text);
    struct field *field = &gpu->fields[gpu->field_count++];
    if (sscanf(text, "%u %u %lf", &field->id, &field->type, &field->real) != 3) complain(text);
    sscanf(text, "%*u %*u %llu", &field->number);
}

static void add_activity(struct gpu *gpu, const char *text) {
    if (gpu->activity_count == MAX_FIELDS) complain(text);
    struct activity *activity = &gpu->activities[gpu->activity_count++];
    if (sscanf(text, "%u %lf", &activity->metric, &activity->value) != 2) complain(text);
}

static void add_link(struct gpu *gpu, const char *text) {
    if (gpu->link_count == MAX_LINKS) complain(text);
    gpu->links[gpu->link_count++] = atoi(text);
}

static void add_event(struct config *config, const char *text) {
    if (config->event_count == MAX_EVENTS) complain(text);
    struct event *event = &config->events[config->event_count++];
    if (sscanf(text, "%lld %d %llu %llu", &event->sequence, &event->gpu, &event->type, &event->data) != 4)
        complain(text);
}

static void read_gpu_line(struct config *config, const char *line) {
    int index, used = 0;
    char key[64];
    if (sscanf(line, "%d %63s %n", &index, key, &used) != 2 || index < 0 || index >= MAX_GPUS) complain(line);
    struct gpu *gpu = &config->gpus[index];
    if (index >= config->gpu_count) config->gpu_count = index + 1;
    if (strcmp(key, "rule") == 0) add_rule(&gpu->rules, line + used);
    else if (strcmp(key, "process") == 0) add_process(gpu, line + used);
    else if (strcmp(key, "field") == 0) add_field(gpu, line + used);
    else if (strcmp(key, "activity") == 0) add_activity(gpu, line + used);
    else if (strcmp(key, "nvlink") == 0) add_link(gpu, line + used);
    else set_key(gpu_keys, gpu, key, line + used);
}

static void read_line(struct config *config, char *line) {
    line[strcspn(line, "\n")] = '\0';
    int used = 0;
    char word[64] = "", key[64] = "";
    if (sscanf(line, "%63s %n", word, &used) != 1) return;
    const char *rest = line + used;
    if (strcmp(word, "gpu") == 0) {
        read_gpu_line(config, rest);
    } else if (strcmp(word, "event") == 0) {
        add_event(config, rest);
    } else if (strcmp(word, "system") == 0 && sscanf(rest, "%63s %n", key, &used) == 1) {
        if (strcmp(key, "rule") == 0) add_rule(&config->rules, rest + used);
        else set_key(system_keys, config, key, rest + used);
    } else {
        complain(line);
    }
}

static struct config *read_config(FILE *file) {
    struct config *config = calloc(1, sizeof *config);
    char line[1024];
    while (config != NULL && fgets(line, sizeof line, file) != NULL) read_line(config, line);
    if (config != NULL) add_instances(config);
    return config;
}

static bool is_same(const struct stat *one, const struct stat *other) {
    return one->st_ino == other->st_ino && one->st_size == other->st_size &&
           one->st_mtim.tv_sec == other->st_mtim.tv_sec && one->st_mtim.tv_nsec == other->st_mtim.tv_nsec;
}

struct config *current_config(bool *moved) {
    static struct config *config;
    static char read_path[MAX_PATH];
    static struct stat read_state;

    const char *path = getenv("NVML_DOUBLE_CONFIG");
    if (path == NULL) path = "";
    *moved = strcmp(path, read_path) != 0;
    struct stat state;
    if (stat(path, &state) != 0) {
        snprintf(read_path, sizeof read_path, "%s", path);
        free(config);
        return config = NULL;
    }
    if (config != NULL && !*moved && is_same(&state, &read_state)) return config;

    FILE *file = fopen(path, "r");
    if (file == NULL) return config;
    free(config);
    config = read_config(file);
    fstat(fileno(file), &read_state);
    fclose(file);
    snprintf(read_path, sizeof read_path, "%s", path);
    return config;
}
