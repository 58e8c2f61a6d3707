/* Event sets: the control file holds the events that happened, each with a growing sequence number. */
#include "double.h"

#include <string.h>
#include <time.h>

/* Another thread may take the news of a change that this one waits for. */
enum { MAX_SETS = 16, MOST_MS = 1000 };

struct event_set {
    bool in_use;
    long long session;
    long long seen; /* the last sequence number that the owner got, or that was there before */
    unsigned long long types[MAX_GPUS];
};

static struct event_set sets[MAX_SETS];

static bool is_alive(const struct event_set *set) {
    return set->in_use && set->session == session_number();
}

static long long last_sequence(const struct config *config) {
    long long last = 0;
    for (int i = 0; i < config->event_count; i++)
        if (config->events[i].sequence > last) last = config->events[i].sequence;
    return last;
}

EXPORT int nvmlEventSetCreate(struct event_set **set) {
    int code = begin_system(__func__);
    if (code != OK) return code;
    for (int i = 0; i < MAX_SETS; i++) {
        if (is_alive(&sets[i])) continue;
        memset(&sets[i], 0, sizeof sets[i]);
        sets[i].in_use = true;
        sets[i].session = session_number();
        sets[i].seen = last_sequence(config_in_use());
        *set = &sets[i];
        return finish(OK);
    }
    return finish(OUT_OF_MEMORY);
}

EXPORT int nvmlDeviceRegisterEvents(void *device, unsigned long long types, struct event_set *set) {
    struct gpu *gpu;
    int code = begin_device(__func__, device, &gpu);
    if (code != OK) return code;
    if (!is_alive(set)) return finish(INVALID_ARGUMENT);
    if (gpu->supported_events < 0 || (types & ~(unsigned long long)gpu->supported_events) != 0)
        return finish(NOT_SUPPORTED);
    set->types[gpu - config_in_use()->gpus] |= types;
    return finish(OK);
}

struct event_data {
    void *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

static bool take_event(struct event_set *set, struct event_data *data) {
    const struct config *config = config_in_use();
    for (int i = 0; i < config->event_count; i++) {
        const struct event *event = &config->events[i];
        if (event->sequence <= set->seen || event->gpu < 0 || event->gpu >= config->gpu_count) continue;
        set->seen = event->sequence;
        if ((set->types[event->gpu] & event->type) == 0) continue;
        /* All bits set: the event concerns the whole GPU and no part of it. */
        *data = (struct event_data){handle_of(event->gpu), event->type, event->data, ~0U, ~0U};
        return true;
    }
    return false;
}

static long long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

EXPORT int nvmlEventSetWait_v2(struct event_set *set, struct event_data *data, unsigned timeout_ms) {
    int code = begin_system(__func__);
    if (code != OK) return code;
    long long session = session_number(), deadline = now_ms() + timeout_ms;
    while (code == OK) {
        if (!is_alive(set)) return finish(INVALID_ARGUMENT);
        if (take_event(set, data)) return finish(OK);
        long long left = deadline - now_ms();
        if (left <= 0) return finish(TIMED_OUT);
        code = wait_then_resume(left < MOST_MS ? (int)left : MOST_MS, session);
    }
    return finish(code);
}

EXPORT int nvmlEventSetFree(struct event_set *set) {
    int code = begin_system(__func__);
    if (code != OK) return code;
    if (!is_alive(set)) return finish(INVALID_ARGUMENT);
    set->in_use = false;
    return finish(OK);
}
