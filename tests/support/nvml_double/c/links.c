/* NVLinks of a GPU, numbered from 0 in the order of the control file; all are up but the last `links_down`. */
#include "double.h"

static const char *const switch_address = "00000000:C1:00.0";

EXPORT int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *is_active) {
    DEVICE_CALL(device);
    if (gpu->link_count == 0) return finish(NOT_SUPPORTED);
    if (link >= (unsigned)gpu->link_count) return finish(INVALID_ARGUMENT);
    *is_active = link + (unsigned)gpu->links_down < (unsigned)gpu->link_count;
    return finish(OK);
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, struct pci_info *info) {
    DEVICE_CALL(device);
    if (link >= (unsigned)gpu->link_count) return finish(INVALID_ARGUMENT);
    int peer = gpu->links[link];
    const struct config *config = config_in_use();
    if (peer >= config->gpu_count) return finish(INVALID_ARGUMENT);
    return finish(give_address(peer < 0 ? switch_address : config->gpus[peer].pci_bus_id, info));
}
