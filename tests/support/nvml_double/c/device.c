/* Readings of one GPU, in the units of the library: bytes, percent, mW, mJ, MHz, degrees Celsius. */
#include "double.h"

#include <stdio.h>
#include <string.h>

static bool is_mig_device(const struct gpu *gpu) {
    return gpu->parent >= 0;
}

/* The library cannot tell how busy a GPU is that is divided, nor how busy its parts are. */
static bool has_utilization(const struct gpu *gpu) {
    return !is_mig_device(gpu) && gpu->mig_mode != 1 && gpu->utilization >= 0;
}

#define TEXT_READING(FUNCTION, MEMBER) \
    EXPORT int FUNCTION(void *device, char *text, unsigned length) { \
        DEVICE_CALL(device); \
        return finish(gpu->MEMBER[0] == '\0' ? NOT_SUPPORTED : give_text(text, length, gpu->MEMBER)); \
    }

TEXT_READING(nvmlDeviceGetName, name)
TEXT_READING(nvmlDeviceGetUUID, uuid)
TEXT_READING(nvmlDeviceGetSerial, serial)
TEXT_READING(nvmlDeviceGetVbiosVersion, vbios)

/* A number of the board, which a MIG device does not have on its own. */
#define NUMBER_READING(FUNCTION, TYPE, MEMBER) \
    EXPORT int FUNCTION(void *device, TYPE *value) { \
        DEVICE_CALL(device); \
        if (gpu->MEMBER < 0 || is_mig_device(gpu)) return finish(NOT_SUPPORTED); \
        *value = (TYPE)gpu->MEMBER; \
        return finish(OK); \
    }

NUMBER_READING(nvmlDeviceGetMinorNumber, unsigned, minor_number)
NUMBER_READING(nvmlDeviceGetNumaNodeId, unsigned, numa_node)
NUMBER_READING(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, energy_mj)
NUMBER_READING(nvmlDeviceGetPerformanceState, int, performance_state)
NUMBER_READING(nvmlDeviceGetPersistenceMode, int, persistence_mode)
NUMBER_READING(nvmlDeviceGetFanSpeed, unsigned, fan)
NUMBER_READING(nvmlDeviceGetComputeMode, int, compute_mode)
NUMBER_READING(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, event_reasons)
NUMBER_READING(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, event_reasons)
NUMBER_READING(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, pcie_generation)
NUMBER_READING(nvmlDeviceGetCurrPcieLinkWidth, unsigned, pcie_width)
NUMBER_READING(nvmlDeviceGetSupportedEventTypes, unsigned long long, supported_events)

EXPORT int nvmlDeviceGetIndex(void *device, unsigned *index) {
    DEVICE_CALL(device);
    *index = (unsigned)(is_mig_device(gpu) ? gpu->mig_index : gpu - config_in_use()->gpus);
    return finish(OK);
}

int give_address(const char *bus_id, struct pci_info *info) {
    memset(info, 0, sizeof *info);
    if (sscanf(bus_id, "%x:%x:%x", &info->domain, &info->bus, &info->device) != 3) return NOT_SUPPORTED;
    snprintf(info->bus_id, sizeof info->bus_id, "%s", bus_id);
    snprintf(info->legacy_bus_id, sizeof info->legacy_bus_id, "%04x:%02x:%02x.0", info->domain & 0xffff,
             info->bus & 0xff, info->device & 0xff);
    return OK;
}

EXPORT int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *info) {
    DEVICE_CALL(device);
    return finish(give_address(gpu->pci_bus_id, info));
}

struct memory {
    unsigned long long total, free, used;
};

/* The first form knows no reserved memory and counts it as used. */
EXPORT int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    DEVICE_CALL(device);
    if (gpu->memory_total < 0) return finish(NOT_SUPPORTED);
    memory->total = (unsigned long long)gpu->memory_total;
    memory->free = (unsigned long long)gpu->memory_free;
    memory->used = memory->total - memory->free;
    return finish(OK);
}

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

EXPORT int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *memory) {
    DEVICE_CALL(device);
    if (memory->version != (2U << 24 | sizeof *memory)) return finish(VERSION_MISMATCH);
    if (gpu->memory_total < 0) return finish(NOT_SUPPORTED);
    memory->total = (unsigned long long)gpu->memory_total;
    memory->reserved = (unsigned long long)gpu->memory_reserved;
    memory->free = (unsigned long long)gpu->memory_free;
    memory->used = (unsigned long long)gpu->memory_used;
    return finish(OK);
}

struct utilization {
    unsigned gpu, memory;
};

EXPORT int nvmlDeviceGetUtilizationRates(void *device, struct utilization *utilization) {
    DEVICE_CALL(device);
    if (!has_utilization(gpu)) return finish(NOT_SUPPORTED);
    utilization->gpu = (unsigned)gpu->utilization;
    utilization->memory = (unsigned)gpu->memory_utilization;
    return finish(OK);
}

#define ENGINE_READING(FUNCTION, MEMBER) \
    EXPORT int FUNCTION(void *device, unsigned *percent, unsigned *period_us) { \
        DEVICE_CALL(device); \
        if (!has_utilization(gpu) || gpu->MEMBER < 0) return finish(NOT_SUPPORTED); \
        *percent = (unsigned)gpu->MEMBER; \
        *period_us = 167000; \
        return finish(OK); \
    }

ENGINE_READING(nvmlDeviceGetEncoderUtilization, encoder)
ENGINE_READING(nvmlDeviceGetDecoderUtilization, decoder)

EXPORT int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    DEVICE_CALL(device);
    if (sensor != 0) return finish(INVALID_ARGUMENT);
    if (gpu->temperature < 0 || is_mig_device(gpu)) return finish(NOT_SUPPORTED);
    *celsius = (unsigned)gpu->temperature;
    return finish(OK);
}

struct temperature_v1 {
    unsigned version;
    int sensor;
    int celsius;
};

EXPORT int nvmlDeviceGetTemperatureV(void *device, struct temperature_v1 *temperature) {
    DEVICE_CALL(device);
    if (temperature->version != (1U << 24 | sizeof *temperature)) return finish(VERSION_MISMATCH);
    if (temperature->sensor != 0) return finish(INVALID_ARGUMENT);
    if (gpu->temperature < 0 || is_mig_device(gpu)) return finish(NOT_SUPPORTED);
    temperature->celsius = (int)gpu->temperature;
    return finish(OK);
}

/* Clock domains: 0 graphics and 1 SM run as one here, 2 memory, 3 video. */
static int give_clock(const struct gpu *gpu, int domain, long long sm, long long memory, long long video,
                      unsigned *mhz) {
    if (domain < 0 || domain > 3) return finish(INVALID_ARGUMENT);
    long long value = domain == 3 ? video : domain == 2 ? memory : sm;
    if (value < 0 || is_mig_device(gpu)) return finish(NOT_SUPPORTED);
    *mhz = (unsigned)value;
    return finish(OK);
}

EXPORT int nvmlDeviceGetClockInfo(void *device, int domain, unsigned *mhz) {
    DEVICE_CALL(device);
    return give_clock(gpu, domain, gpu->sm_clock, gpu->memory_clock, gpu->video_clock, mhz);
}

EXPORT int nvmlDeviceGetMaxClockInfo(void *device, int domain, unsigned *mhz) {
    DEVICE_CALL(device);
    return give_clock(gpu, domain, gpu->max_sm_clock, gpu->max_memory_clock, -1, mhz);
}

struct bar1 {
    unsigned long long total, free, used;
};

EXPORT int nvmlDeviceGetBAR1MemoryInfo(void *device, struct bar1 *memory) {
    DEVICE_CALL(device);
    if (gpu->bar1_total < 0 || is_mig_device(gpu)) return finish(NOT_SUPPORTED);
    memory->total = (unsigned long long)gpu->bar1_total;
    memory->used = (unsigned long long)gpu->bar1_used;
    memory->free = memory->total - memory->used;
    return finish(OK);
}

struct licensable_feature {
    int code;
    unsigned state;
    char info[128], product[128];
    unsigned enabled;
    struct {
        unsigned year;
        unsigned short month, day, hour, minute, second;
        unsigned char status;
    } expiry;
};

struct licensable_features {
    int supported;
    unsigned count;
    struct licensable_feature items[3];
};

/* Of a GPU with vGPU: a feature of another code (2, workstations), and that of vGPU (1). */
EXPORT int nvmlDeviceGetGridLicensableFeatures_v4(void *device, struct licensable_features *features) {
    DEVICE_CALL(device);
    memset(features, 0, sizeof *features);
    if (gpu->vgpu_licensed < 0 || is_mig_device(gpu)) return finish(OK);
    features->supported = 1;
    features->count = 2;
    features->items[0].code = 2;
    features->items[0].state = gpu->vgpu_licensed == 0;
    features->items[1].code = 1;
    features->items[1].state = (unsigned)gpu->vgpu_licensed;
    return finish(OK);
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    DEVICE_CALL(device);
    *major = (int)gpu->compute_major;
    *minor = (int)gpu->compute_minor;
    return finish(OK);
}

/* Kinds of errors: 0 corrected, 1 uncorrected. The counters since boot and since ever are one here. */
EXPORT int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *count) {
    DEVICE_CALL(device);
    (void)counter;
    long long value = kind == 0 ? gpu->ecc_corrected : gpu->ecc_uncorrected;
    if (value < 0 || is_mig_device(gpu)) return finish(NOT_SUPPORTED);
    *count = (unsigned long long)value;
    return finish(OK);
}

EXPORT int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected,
                                     unsigned *pending, unsigned *failed) {
    DEVICE_CALL(device);
    if (gpu->remapped_corrected < 0 || is_mig_device(gpu)) return finish(NOT_SUPPORTED);
    *corrected = (unsigned)gpu->remapped_corrected;
    *uncorrected = (unsigned)gpu->remapped_uncorrected;
    *pending = (unsigned)gpu->remap_pending;
    *failed = (unsigned)gpu->remap_failed;
    return finish(OK);
}
