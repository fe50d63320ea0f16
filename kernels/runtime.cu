// The runtime behind the C ABI: memory, copies, streams, events and what device this is. Thin: each function is one call of
// the CUDA runtime. host.cpp has the same functions for the shim.
#include "portable.h"

#include <stdio.h>

CK_API uint32_t ck_abi(void) { return uint32_t(sizeof(ck_desc)) << 8 | CK_ABI_VERSION; }
CK_API const char* ck_error_name(int error) { return cudaGetErrorName(cudaError_t(error)); }
CK_API const char* ck_error_text(int error) { return cudaGetErrorString(cudaError_t(error)); }
CK_API int ck_devices(int* count) { return cudaGetDeviceCount(count); }

CK_API int ck_info(int device, ck_device_info* out) {
    cudaDeviceProp p;
    int before = 0;
    size_t available = 0, total = 0;
    cudaError_t e = cudaGetDeviceProperties(&p, device);
    if (e == cudaSuccess) e = cudaGetDevice(&before);
    if (e == cudaSuccess) e = cudaSetDevice(device);
    if (e == cudaSuccess) e = cudaMemGetInfo(&available, &total);
    if (e == cudaSuccess) e = cudaSetDevice(before);
    if (e != cudaSuccess) return e;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", p.name);
    int at = snprintf(out->uuid, sizeof out->uuid, "GPU-");
    for (int i = 0; i < 16; ++i) // 8-4-4-4-12 digits
        at += snprintf(out->uuid + at, sizeof out->uuid - at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                       (unsigned char)p.uuid.bytes[i]);
    out->total_bytes = total;
    out->free_bytes = available;
    out->major = p.major;
    out->minor = p.minor;
    out->multiprocessors = p.multiProcessorCount;
    out->l2_bytes = p.l2CacheSize;
    out->warp = p.warpSize;
    e = cudaDriverGetVersion(&out->driver);
    return e == cudaSuccess ? cudaRuntimeGetVersion(&out->runtime) : e;
}

CK_API int ck_use(int device) { return cudaSetDevice(device); }

CK_API int ck_alloc(void** out, size_t bytes) {
    *out = nullptr;
    return bytes ? cudaMalloc(out, bytes) : cudaSuccess;
}
CK_API int ck_free(void* p) { return cudaFree(p); }
CK_API int ck_host_alloc(void** out, size_t bytes) {
    *out = nullptr;
    return bytes ? cudaHostAlloc(out, bytes, cudaHostAllocPortable) : cudaSuccess;
}
CK_API int ck_host_free(void* p) { return p ? cudaFreeHost(p) : cudaSuccess; }

static int copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, void* stream) {
    return bytes ? cudaMemcpyAsync(to, from, bytes, kind, cudaStream_t(stream)) : cudaSuccess;
}
CK_API int ck_upload(void* to, const void* from, size_t bytes, void* stream) {
    return copy(to, from, bytes, cudaMemcpyHostToDevice, stream);
}
CK_API int ck_download(void* to, const void* from, size_t bytes, void* stream) {
    return copy(to, from, bytes, cudaMemcpyDeviceToHost, stream);
}
CK_API int ck_move(void* to, const void* from, size_t bytes, void* stream) {
    return copy(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
CK_API int ck_fill(void* to, int byte, size_t bytes, void* stream) {
    return bytes ? cudaMemsetAsync(to, byte, bytes, cudaStream_t(stream)) : cudaSuccess;
}

CK_API int ck_stream_create(void** out) { return cudaStreamCreateWithFlags((cudaStream_t*)out, cudaStreamNonBlocking); }
CK_API int ck_stream_destroy(void* stream) { return cudaStreamDestroy(cudaStream_t(stream)); }
CK_API int ck_stream_sync(void* stream) { return cudaStreamSynchronize(cudaStream_t(stream)); }
CK_API int ck_event_create(void** out) { return cudaEventCreate((cudaEvent_t*)out); }
CK_API int ck_event_destroy(void* event) { return cudaEventDestroy(cudaEvent_t(event)); }
CK_API int ck_event_record(void* event, void* stream) { return cudaEventRecord(cudaEvent_t(event), cudaStream_t(stream)); }
CK_API int ck_event_elapsed(float* milliseconds, void* begin, void* end) {
    const cudaError_t e = cudaEventSynchronize(cudaEvent_t(end));
    return e == cudaSuccess ? cudaEventElapsedTime(milliseconds, cudaEvent_t(begin), cudaEvent_t(end)) : e;
}
