// Every word of portable.h used once, so that a header that no longer compiles on one of the two machines is seen at once,
// whichever kernels happen to use it. Compiled for every architecture by nvcc and by g++ with the shim; the shim runs it too.
#include "portable.h"

static_assert(sizeof(ck_desc) == 136 && alignof(ck_desc) == 8, "the packed list of descriptors.py");
static_assert(offsetof(ck_desc, run) == 64 && offsetof(ck_desc, ext) == 104 && offsetof(ck_desc, flags) == 134, "");
static_assert(sizeof(ck_v16) == 16 && alignof(ck_v16) == 16 && sizeof(ck_v8) == 8 && alignof(ck_v8) == 8, "");
static_assert(sizeof(ck_device_info) == 216, "library.py, _Info");

namespace {

struct Counter {
    uint32_t n = 0;
    CK_MEMBER void add(uint32_t k) { n += k; }
};

template <class V> CK_DEVICE void pass_on(uint64_t from, uint64_t to) { ck_store<V>(to, ck_load<V>(from)); }

CK_CONSTANT uint64_t TABLE[2] = {3, ~uint64_t(0)};

CK_KERNEL(64) void words(uint64_t from, uint64_t to, const ck_desc* list, uint32_t count, uint64_t magic, uint64_t* sums) {
    CK_SHARED(uint64_t, seen, 64);
    seen[ck_tid()] = ck_tid() + 1;
    ck_sync();
    const uint64_t other = seen[ck_nt() - 1 - ck_tid()];
    ck_warp_sync();
    const uint32_t sum32 = ck_shfl_xor(uint32_t(ck_tid()), 1);
    const uint64_t sum64 = ck_shfl_xor(other, 16);
    ck_atomic_add(&sums[0], other);
    ck_atomic_min(&sums[1], sum64);
    ck_atomic_max(&sums[2], sum64);
    ck_atomic_max((uint32_t*)&sums[3], sum32);
    ck_atomic_min((uint32_t*)&sums[3] + 1, sum32);
    ck_atomic_add((uint32_t*)&sums[4], 1u);
    if (ck_tid() == 0 && ck_bid() + 1 == ck_nb()) {
        ck_prefetch(from);
        pass_on<uint8_t>(from, to);
        pass_on<uint16_t>(from + 2, to + 2);
        pass_on<uint32_t>(from + 4, to + 4);
        pass_on<ck_v8>(from + 8, to + 8);
        pass_on<ck_v16>(from + 16, to + 16);
        sums[5] = ck_find(list, count, 7);
        sums[6] = uint64_t(ck_row(list[0], list[0].sstr, 5));
        sums[7] = ck_funnel(0x44332211u, 0x88776655u, 1);
        sums[8] = ck_div(1000003u, magic) + ck_div(5u, 0);
    }
}

CK_KERNEL(32, 1) void alone(uint64_t from, uint64_t* sums) {
    uint64_t sum = 0;
    CK_UNROLL
    for (int u = 0; u < 4; ++u) sum += u;
    CK_ROLLED
    for (uint32_t u = 0; u < 2; ++u) sum += ck_mul_high(TABLE[u], TABLE[1]) - ck_ones(uint32_t(TABLE[u]));
    sum += ck_load_own<uint32_t>(uint64_t(&sums[9])) * 0;
    Counter counter;
    for (uint32_t u = 0; u < 3; ++u) counter.add(ck_fresh(u));
    sum += counter.n + ck_load_near<uint32_t>(from + 4) + ck_load_kept(from + 16).w;
    if (ck_tid() == 0) sums[9] = sum;
}

} // namespace

CK_API int ck_words(uint64_t from, uint64_t to, const ck_desc* list, uint32_t count, uint64_t* sums, int blocks, void* stream) {
    blocks = ck_fill_grid(blocks, 1, 2);
    if (blocks == 0) return ck_last_error();
    const int status = CK_LAUNCH_SYNC(words, blocks, 64, stream, from, to, list, count, ck_magic(7), sums);
    return status != cudaSuccess ? status : CK_LAUNCH(alone, 1, 32, stream, from, sums);
}
