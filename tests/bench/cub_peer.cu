// cub::DeviceMemcpy::Batched behind a C ABI: the peer of box_copy on lists of contiguous ranges. Built by kernel_peers.py alone.
#include <cub/device/device_memcpy.cuh>

extern "C" __attribute__((visibility("default"))) int cub_batched(void* temporary, size_t* bytes, void** from, void** to,
                                                                  size_t* sizes, unsigned count, void* stream) {
    return cub::DeviceMemcpy::Batched(temporary, *bytes, from, to, sizes, count, cudaStream_t(stream));
}
