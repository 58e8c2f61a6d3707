/* What every call does before its own work: lock, read the control file, count, wait, and perhaps fail. */
#include "double.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FUNCTIONS = 96, NO_GPU = -1 };

/* One line of the counter file; the Python side reads the same 64 bytes. */
struct counter {
    char function[48];
    int64_t gpu; /* NO_GPU for calls that name none */
    uint64_t calls;
};

static pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER;

static struct config *config;
static int users;                    /* starts without their end */
static long long session;            /* grows with every start after a complete end */
static long long session_generation; /* of the driver when the session began */

static struct counter *counters;
static int changes = -1; /* readable once the control file was replaced */

static void open_counters(void) {
    if (counters != NULL) munmap(counters, sizeof *counters * MAX_FUNCTIONS * (MAX_GPUS + 1));
    counters = NULL;
    char path[MAX_PATH];
    const char *base = getenv("NVML_DOUBLE_CONFIG");
    if (base == NULL) return;
    if (snprintf(path, sizeof path, "%s.calls.%d", base, (int)getpid()) >= (int)sizeof path) return;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    size_t bytes = sizeof *counters * MAX_FUNCTIONS * (MAX_GPUS + 1);
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0) return;
    void *place = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (place != MAP_FAILED) counters = place;
}

/* Watch the folder: a control file is put in force by renaming it. */
static void open_changes(void) {
    if (changes >= 0) close(changes);
    changes = -1;
    char path[MAX_PATH];
    const char *base = getenv("NVML_DOUBLE_CONFIG");
    if (base == NULL || snprintf(path, sizeof path, "%s", base) >= (int)sizeof path) return;
    changes = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (changes >= 0) inotify_add_watch(changes, dirname(path), IN_MOVED_TO);
}

static void count_call(const char *function, int gpu) {
    /* The names of functions are unique addresses: no need to compare texts. */
    static const char *known[MAX_FUNCTIONS];
    if (counters == NULL) return;
    int row = 0;
    while (row < MAX_FUNCTIONS - 1 && known[row] != NULL && known[row] != function) row++;
    known[row] = function;
    struct counter *counter = &counters[row * (MAX_GPUS + 1) + gpu + 1];
    if (counter->calls++ > 0) return;
    counter->gpu = gpu;
    snprintf(counter->function, sizeof counter->function, "%s", function);
}

static void refresh(void) {
    bool moved;
    config = current_config(&moved);
    if (!moved) return;
    /* Another control file is another machine: nothing of the old one is left. */
    users = 0;
    session++;
    open_counters();
    open_changes();
}

static void sleep_ms(int milliseconds) {
    struct timespec rest = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    while (nanosleep(&rest, &rest) != 0 && errno == EINTR) {
    }
}

static void use_cpu(long long microseconds) {
    struct timespec now;
    long long until = 0, spent;
    do {
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        spent = now.tv_sec * 1000000LL + now.tv_nsec / 1000;
        if (until == 0) until = spent + microseconds;
    } while (spent < until);
}

/* A session is dead when it was ended, when another began, or when the driver was loaded again meanwhile. */
static int session_state(long long expected) {
    if (config == NULL || users == 0 || session != expected) return UNINITIALIZED;
    return config->generation == session_generation ? OK : UNKNOWN_ERROR;
}

static bool applies(const struct rule *rule, const char *function) {
    return strcmp(rule->function, "*") == 0 || strcmp(rule->function, function) == 0;
}

static int code_of(const struct rules *rules, const char *function) {
    int code = OK;
    for (int i = 0; i < rules->count; i++)
        if (applies(&rules->items[i], function) && rules->items[i].code != OK) code = rules->items[i].code;
    return code;
}

/* Serve the holds of a call. The lock is free meanwhile: pointers into the config are void. */
static void serve_waits(const struct rules *rules, const char *function) {
    char hold[MAX_PATH] = "";
    for (int i = 0; i < rules->count; i++) {
        if (!applies(&rules->items[i], function)) continue;
        if (rules->items[i].hold[0] != '\0') strcpy(hold, rules->items[i].hold);
    }
    bool exclusive = config->driver_lock != 0;
    long long busy_us = strstr(function, "RunningProcesses") != NULL ? 10 * config->busy_us : config->busy_us;
    if (hold[0] == '\0' && busy_us == 0 && !exclusive) return;
    pthread_mutex_unlock(&state_lock);
    if (exclusive) pthread_mutex_lock(&driver_lock);
    if (busy_us > 0) use_cpu(busy_us);
    while (hold[0] != '\0' && access(hold, F_OK) != 0) sleep_ms(2);
    if (exclusive) pthread_mutex_unlock(&driver_lock);
    pthread_mutex_lock(&state_lock);
    refresh();
}

int finish(int code) {
    pthread_mutex_unlock(&state_lock);
    return code;
}

int begin_library(const char *function) {
    pthread_mutex_lock(&state_lock);
    refresh();
    count_call(function, NO_GPU);
    if (config == NULL) return finish(LIBRARY_NOT_FOUND);
    serve_waits(&config->rules, function);
    if (config == NULL) return finish(LIBRARY_NOT_FOUND);
    int code = code_of(&config->rules, function);
    return code == OK ? OK : finish(code);
}

int begin_system(const char *function) {
    int code = begin_library(function);
    if (code != OK) return code;
    code = session_state(session);
    return code == OK ? OK : finish(code);
}

/* Another figure each second, and none that two GPUs share. */
static void move(struct gpu *gpu, int index) {
    long long second = (long long)time(NULL) + 17 * index;
    gpu->utilization = second * 7 % 101;
    gpu->memory_utilization = second * 5 % 101;
    gpu->temperature = 40 + second % 31;
    gpu->power_mw = 70000 + second * 7919 % 600000;
    gpu->sm_clock = 1200 + second * 15 % 780;
}

int begin_device(const char *function, void *handle, struct gpu **gpu) {
    pthread_mutex_lock(&state_lock);
    refresh();
    long long own_session = session;
    int index = index_of(handle);
    count_call(function, index >= 0 && index < MAX_GPUS ? index : NO_GPU);
    int code = session_state(own_session);
    if (code == OK && index < 0) code = INVALID_ARGUMENT;
    if (code == OK && index >= config->gpu_count) code = GPU_IS_LOST;
    if (code == OK) {
        serve_waits(&config->gpus[index].rules, function);
        code = session_state(own_session);
    }
    if (code == OK && index >= config->gpu_count) code = GPU_IS_LOST;
    /* A MIG device that was destroyed. */
    if (code == OK && config->gpus[index].parent >= 0 && config->gpus[index].mig_index < 0) code = INVALID_ARGUMENT;
    if (code == OK && config->moving) move(&config->gpus[index], index);
    if (code == OK) code = failure_of(function, *gpu = &config->gpus[index]);
    return code == OK ? OK : finish(code);
}

int failure_of(const char *function, const struct gpu *gpu) {
    return code_of(&gpu->rules, function);
}

/* As long as nothing changes this costs nothing, as with a driver. Whoever else waits may be who is woken. */
int wait_then_resume(int milliseconds, long long own_session) {
    struct pollfd wanted = {changes, POLLIN, 0};
    pthread_mutex_unlock(&state_lock);
    char events[1024];
    if (poll(&wanted, wanted.fd >= 0, milliseconds) > 0 && read(wanted.fd, events, sizeof events) < 0) sleep_ms(1);
    pthread_mutex_lock(&state_lock);
    refresh();
    return session_state(own_session);
}

/* Only the first start finds the driver as it is now; what an earlier session gave out stays dead. */
int start_session(void) {
    if (users++ > 0) return OK;
    session++;
    session_generation = config->generation;
    return OK;
}

int end_session(void) {
    if (users == 0) return UNINITIALIZED;
    users--;
    return OK;
}

long long session_number(void) {
    return session;
}

struct config *config_in_use(void) {
    return config;
}

/* A handle is no address: the session in its upper bits tells those that were given before it. */
void *handle_of(int index) {
    return (void *)(uintptr_t)((unsigned long long)session << 16 | (unsigned)(index + 1));
}

int index_of(void *handle) {
    unsigned long long value = (uintptr_t)handle;
    return value >> 16 == (unsigned long long)session ? (int)(value & 0xffff) - 1 : -1;
}

int give_text(char *buffer, unsigned length, const char *text) {
    if (buffer == NULL) return INVALID_ARGUMENT;
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return OK;
}
