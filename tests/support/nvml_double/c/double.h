/*
 * A test double of the NVIDIA management library, loaded in the place of libnvidia-ml.so.1.
 *
 * It knows nothing but what its control file says (environment variable NVML_DOUBLE_CONFIG), and reads that
 * file again whenever it changes, so a test changes the hardware while the program under test runs. It counts
 * every call in a file beside the control file.
 *
 * config.c   the control file           calls.c    what every call does first: count, wait, fail
 * system.c   start, versions, lookup    device.c   readings of one GPU
 * lists.c    processes, fields, MIG     events.c   event sets
 * links.c    NVLinks                    gpm.c      performance counters
 * power.c    draw and limits          mig.c      MIG instances made and destroyed
 */
#ifndef NVML_DOUBLE_H
#define NVML_DOUBLE_H

#include <stdbool.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

/* Result codes that the double itself gives; a control file may ask for any other number. */
enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMED_OUT = 10,
    LIBRARY_NOT_FOUND = 12,
    GPU_IS_LOST = 15,
    IN_USE = 19,
    OUT_OF_MEMORY = 20,
    INSUFFICIENT_RESOURCES = 23,
    VERSION_MISMATCH = 25,
    UNKNOWN_ERROR = 999
};

enum { MAX_GPUS = 72, MAX_RULES = 16, MAX_PROCESSES = 64, MAX_FIELDS = 64, MAX_EVENTS = 64, MAX_LINKS = 36, MAX_PATH = 512 };

/* What a call of `function` ("*": of any) does beside its work; the last rule that returns a code wins. */
struct rule {
    char function[64];
    int code;              /* returned in place of a reading; OK leaves the reading */
    char hold[MAX_PATH];   /* the call blocks first, until this file exists */
};

struct rules {
    int count;
    struct rule items[MAX_RULES];
};

enum process_kind { COMPUTE, GRAPHICS, MPS };

struct process {
    enum process_kind kind;
    unsigned pid;
    unsigned long long used_bytes; /* all bits set: not available */
    unsigned gpu_instance;
    unsigned compute_instance;
    int sm_percent, memory_percent, encoder_percent, decoder_percent; /* negative: no sample of its use */
};

struct field {
    unsigned id;
    unsigned type; /* of the value, as the library numbers them: 0 double, 1 unsigned, 3 unsigned long long */
    double real;
    unsigned long long number;
};

struct activity {
    unsigned metric;
    double value;
};

struct event {
    long long sequence;
    int gpu;
    unsigned long long type;
    unsigned long long data;
};

/* Every number of a GPU; a negative one means that the GPU does not support the reading. */
#define GPU_NUMBERS(X) \
    X(memory_total) X(memory_free) X(memory_used) X(memory_reserved) \
    X(utilization) X(memory_utilization) X(encoder) X(decoder) \
    X(temperature) X(power_mw) X(power_limit_mw) X(enforced_power_limit_mw) X(energy_mj) \
    X(sm_clock) X(memory_clock) X(video_clock) X(max_sm_clock) X(max_memory_clock) X(performance_state) X(event_reasons) \
    X(mig_mode) X(mig_mode_pending) X(max_mig_devices) X(parent) X(mig_index) \
    X(gpu_instance) X(compute_instance) \
    X(compute_major) X(compute_minor) X(minor_number) X(numa_node) X(persistence_mode) X(supported_events) \
    X(pcie_generation) X(pcie_width) X(ecc_corrected) X(ecc_uncorrected) \
    X(fan) X(bar1_total) X(bar1_used) X(compute_mode) X(vgpu_licensed) X(links_down) \
    X(remapped_corrected) X(remapped_uncorrected) X(remap_pending) X(remap_failed)

struct gpu {
    char name[96];
    char uuid[96];
    char pci_bus_id[32];
    char serial[30];
    char vbios[32];
#define X(member) long long member;
    GPU_NUMBERS(X)
#undef X
    struct rules rules;
    int process_count;
    struct process processes[MAX_PROCESSES];
    int field_count;
    struct field fields[MAX_FIELDS];
    int activity_count; /* none: the GPU has no GPM */
    struct activity activities[MAX_FIELDS];
    int link_count;
    int links[MAX_LINKS]; /* the GPU at the other end of each NVLink; negative for a switch */
};

struct config {
    char driver_version[80];
    char nvml_version[80];
    long long cuda_version;
    long long generation;   /* of the loaded driver: a session of an older one is dead */
    long long driver_lock;  /* nonzero: the driver serves one call at a time */
    long long moving;       /* nonzero: what a busy GPU says of itself changes with the time */
    long long busy_us;      /* CPU that each call on a GPU takes; a list of processes takes ten times that */
    long long record_bytes; /* distance of process records in the answer of the v3 calls */
    struct rules rules;     /* for calls that name no GPU */
    int gpu_count;          /* MIG devices included */
    struct gpu gpus[MAX_GPUS];
    int event_count;
    struct event events[MAX_EVENTS];
};

/* config.c: the control file, or NULL without one; `moved`: it is another file now. Only under the lock. */
struct config *current_config(bool *moved);

/* mig.c: puts the instances that were made into a control file that was read, and takes those away that were destroyed. */
void add_instances(struct config *config);

/* calls.c: `begin` functions return OK with the lock taken, or the code to return with the lock free. */
int begin_library(const char *function);
int begin_system(const char *function);
int begin_device(const char *function, void *handle, struct gpu **gpu);
int finish(int code);
int wait_then_resume(int milliseconds, long long session);
int start_session(void);
int end_session(void);
long long session_number(void);
struct config *config_in_use(void);
void *handle_of(int index);
int index_of(void *handle);
int failure_of(const char *function, const struct gpu *gpu);

/* How every call on a GPU begins: `gpu` is its entry in the control file, or the call is over. */
#define DEVICE_CALL(handle) \
    struct gpu *gpu; \
    int code = begin_device(__func__, handle, &gpu); \
    if (code != OK) return code

struct pci_info {
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

/* device.c: an address such as 00000000:1B:00.0 in the library's form. */
int give_address(const char *bus_id, struct pci_info *info);

/* Copies a text into the caller's buffer. */
int give_text(char *buffer, unsigned length, const char *text);

#endif
