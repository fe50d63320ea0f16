// One source, two machines: nvcc makes kernels of it, g++ (the host shim) makes plain functions that run on the CPU.
//
// A kernel is written once, with these words instead of CUDA's:
//     CK_KERNEL(512) void name(args)      __global__ with launch bounds; (512, 2): and two blocks a multiprocessor
//     ck_tid() ck_nt() ck_bid() ck_nb()   threadIdx.x, blockDim.x, blockIdx.x, gridDim.x
//     ck_fresh(v)                         v, of which the compiler knows nothing: what follows from it isn't moved before the
//                                         loop, where it would sit in registers
//     CK_SHARED(type, name, count)        an array in shared memory
//     CK_CONSTANT type name[] = {...}     a table that never changes
//     ck_fma(a, b, c)                     a * b + c in fp32, rounded once
//     ck_mul_high(a, b), ck_ones(v)       the upper 64 bits of a product; how many bits are set
//     ck_sync()                           __syncthreads()
//     ck_warp_sync(), ck_shfl_xor(v, m)   among the 32 threads of a warp, all of which must take part
//     CK_DEVICE, CK_MEMBER                a function, a member function of a kernel
//     ck_load<V>(address), ck_store(address, v)    global memory, past L1; V of 1, 2, 4, 8 or 16 bytes, aligned
//     ck_load_near<V>(address)            the same by way of L1, for what many threads read; integers, nobody writes them
//     ck_load_kept(address)               16 bytes through L1: for what a neighbour loads too
//     ck_load_own<V>(address)             what the kernel itself writes later on; V of 4 or 16 bytes
//     ck_prefetch(address)                what lies there will be read soon; may be any address of global memory
//     ck_atomic_add / _min / _max / _or   on uint64_t and uint32_t in global or shared memory
//     ck_pair_bf16(a, b), ck_pair_f16, ck_pair_e4m3    two fp32, by their bits and within what the type has, as that type: a in the
//                                         lower half; by the instruction where the GPU has one
//     ck_widen_f16(pair, a, b)            back, of finite ones
//     CK_LAUNCH(kernel, blocks, threads, stream, args...)        a kernel without ck_sync, ck_warp_sync, ck_shfl_xor
//     CK_LAUNCH_SYNC(kernel, blocks, threads, stream, args...)   a kernel with them
// No other intrinsic, no inline PTX and no atomic stands outside this file.
//
// The shim runs the blocks of a grid one after another. Threads of a kernel without barriers are a loop; with barriers they
// are fibers that give way at each barrier, or, with -DCK_THREADS, real threads, so that a thread sanitizer sees what the
// barriers order. It shows wrong indexes, missing barriers and misaligned accesses; it can't show races across blocks,
// memory ordering, launch limits or speed.
#pragma once
#include <stdint.h>
#include <string.h>

#include "ck.h"

struct alignas(16) ck_v16 {
    uint32_t x, y, z, w;
};
struct alignas(8) ck_v8 {
    uint32_t x, y;
};

// floor(n / d) = ck_div(n, ck_magic(d)) for all 32-bit n and d >= 1 (D. Lemire, O. Kaser, N. Kurz, "Faster remainder by
// direct computation", 2019); the magic of 1 does not fit 64 bits and is 0.
static inline uint64_t ck_magic(uint32_t d) { return d <= 1 ? 0 : UINT64_MAX / d + 1; }

// Is there room in the registers for what is only kept for speed? Seen on sm_90; the compiler spills it on sm_80 and sm_100.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
constexpr bool CK_ROOMY = true;
#else
constexpr bool CK_ROOMY = false;
#endif

// How the work is shared out: a block for each tile moves one window over the memory, which is what the memory likes best;
// blocks that walk on through many small boxes need not find their first one so often.
constexpr int CK_EVERY = 0x7fffffff;
static inline bool ck_long(uint64_t tiles, uint32_t boxes) { return tiles / 64 >= boxes; } // tiles a box, on the average

#ifdef __CUDACC__
// ---- the device -----------------------------------------------------------------------------------------------------
#include <cuda_runtime.h>

#define CK_KERNEL(...) static __global__ __launch_bounds__(__VA_ARGS__)
#define CK_DEVICE static __device__ __forceinline__
#define CK_MEMBER __device__ __forceinline__
#define CK_SHARED(type, name, count) __shared__ type name[count]
#define CK_CONSTANT static __constant__ const
#define CK_UNROLL _Pragma("unroll")
#define CK_ROLLED _Pragma("unroll 1")
#define CK_LAUNCH(kernel, blocks, threads, stream, ...) \
    (kernel<<<(blocks), (threads), 0, (cudaStream_t)(stream)>>>(__VA_ARGS__), int(cudaGetLastError()))
#define CK_LAUNCH_SYNC CK_LAUNCH

CK_DEVICE uint32_t ck_fresh(uint32_t v) {
    asm volatile("" : "+r"(v));
    return v;
}
CK_DEVICE unsigned ck_tid() { return threadIdx.x; }
CK_DEVICE unsigned ck_nt() { return blockDim.x; }
CK_DEVICE unsigned ck_bid() { return blockIdx.x; }
CK_DEVICE unsigned ck_nb() { return gridDim.x; }
CK_DEVICE void ck_sync() { __syncthreads(); }
CK_DEVICE void ck_warp_sync() { __syncwarp(); }
CK_DEVICE uint32_t ck_shfl_xor(uint32_t v, unsigned m) { return __shfl_xor_sync(~0u, v, m); }
CK_DEVICE uint64_t ck_shfl_xor(uint64_t v, unsigned m) { return __shfl_xor_sync(~0u, (unsigned long long)v, m); }
CK_DEVICE uint32_t ck_div(uint32_t n, uint64_t magic) { return magic ? uint32_t(__umul64hi(magic, n)) : n; }
CK_DEVICE uint64_t ck_mul_high(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
CK_DEVICE uint32_t ck_ones(uint32_t v) { return __popc(v); }
CK_DEVICE float ck_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// the 4 bytes that begin `bytes` (0..3) bytes into lo, taken from lo and hi
CK_DEVICE uint32_t ck_funnel(uint32_t lo, uint32_t hi, unsigned bytes) { return __funnelshift_r(lo, hi, bytes * 8); }

template <class T> CK_DEVICE T ck_atomic_add(T* p, T v) {
    if constexpr (sizeof(T) == 8)
        return T(atomicAdd((unsigned long long*)p, (unsigned long long)v));
    else
        return T(atomicAdd((unsigned*)p, (unsigned)v));
}
template <class T> CK_DEVICE void ck_atomic_min(T* p, T v) {
    if constexpr (sizeof(T) == 8)
        atomicMin((unsigned long long*)p, (unsigned long long)v);
    else
        atomicMin((unsigned*)p, (unsigned)v);
}
template <class T> CK_DEVICE void ck_atomic_max(T* p, T v) {
    if constexpr (sizeof(T) == 8)
        atomicMax((unsigned long long*)p, (unsigned long long)v);
    else
        atomicMax((unsigned*)p, (unsigned)v);
}

#ifndef CK_STORE_HINT // what stores of 16 bytes tell the caches; ".cs" in kernels that gain by it
#define CK_STORE_HINT ""
#endif

// Loads that bypass L1 and stores, both told to be in global memory: an address made from an integer is generic otherwise,
// and costs a slower instruction.
template <class V> CK_DEVICE V ck_load(uint64_t address) {
    const size_t a = __cvta_generic_to_global((const void*)address);
    V v;
    if constexpr (sizeof(V) == 16) {
        ck_v16 r;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                     : "l"(a));
        memcpy(&v, &r, 16);
    } else if constexpr (sizeof(V) == 8) {
        ck_v8 r;
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(a));
        memcpy(&v, &r, 8);
    } else if constexpr (sizeof(V) == 4) {
        uint32_t r;
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(r) : "l"(a));
        memcpy(&v, &r, 4);
    } else if constexpr (sizeof(V) == 2) {
        uint16_t r;
        asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(r) : "l"(a));
        memcpy(&v, &r, 2);
    } else {
        uint32_t r;
        asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(r) : "l"(a));
        const uint8_t b = uint8_t(r);
        memcpy(&v, &b, 1);
    }
    return v;
}
CK_DEVICE ck_v16 ck_load_kept(uint64_t address) {
    ck_v16 r;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(__cvta_generic_to_global((const void*)address)));
    return r;
}
CK_DEVICE void ck_prefetch(uint64_t address) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global((const void*)address)));
}
template <class V> CK_DEVICE V ck_load_near(uint64_t address) { return __ldg((const V*)address); }
template <class V> CK_DEVICE V ck_load_own(uint64_t address) {
    const size_t a = __cvta_generic_to_global((const void*)address);
    V v;
    static_assert(sizeof(V) == 16 || sizeof(V) == 4);
    if constexpr (sizeof(V) == 16) {
        ck_v16 r;
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(a) : "memory");
        memcpy(&v, &r, 16);
    } else {
        uint32_t r;
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(r) : "l"(a) : "memory");
        memcpy(&v, &r, 4);
    }
    return v;
}
template <class V> CK_DEVICE void ck_store(uint64_t address, V v) {
    const size_t a = __cvta_generic_to_global((void*)address);
    if constexpr (sizeof(V) == 16) {
        ck_v16 r;
        memcpy(&r, &v, 16);
        asm volatile("st.global" CK_STORE_HINT ".v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(a), "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w) : "memory");
    } else if constexpr (sizeof(V) == 8) {
        ck_v8 r;
        memcpy(&r, &v, 8);
        asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(a), "r"(r.x), "r"(r.y) : "memory");
    } else if constexpr (sizeof(V) == 4) {
        uint32_t r;
        memcpy(&r, &v, 4);
        asm volatile("st.global.u32 [%0], %1;" ::"l"(a), "r"(r) : "memory");
    } else if constexpr (sizeof(V) == 2) {
        uint16_t r;
        memcpy(&r, &v, 2);
        asm volatile("st.global.u16 [%0], %1;" ::"l"(a), "h"(r) : "memory");
    } else {
        uint8_t b;
        memcpy(&b, &v, 1);
        asm volatile("st.global.u8 [%0], %1;" ::"l"(a), "r"(uint32_t(b)) : "memory");
    }
}

// Blocks that fill the device: `per` on each multiprocessor, never more than there is work for. 0 on error.
static inline int ck_fill_grid(int blocks, int per, uint64_t work) {
    if (blocks <= 0 && per == CK_EVERY) blocks = CK_EVERY;
    if (blocks <= 0) {
        int device = 0, count = 0;
        if (cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
            return 0;
        blocks = count * per;
    }
    return int(work < uint64_t(blocks) ? work : uint64_t(blocks));
}
static inline int ck_last_error() { return int(cudaGetLastError()); }

#else
// ---- the host shim --------------------------------------------------------------------------------------------------
#include <functional>

enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };

#define CK_KERNEL(...) static
#define CK_CONSTANT static const
#define CK_DEVICE static inline
#define CK_MEMBER inline
#define CK_UNROLL
#define CK_ROLLED
#ifdef CK_THREADS
#define CK_SHARED(type, name, count) static type name[count]
#else
#define CK_SHARED(type, name, count) static thread_local type name[count]
#endif
#define CK_LAUNCH(kernel, blocks, threads, stream, ...) \
    ((void)(stream), ck_host_loop((blocks), (threads), [=] { kernel(__VA_ARGS__); }))
#define CK_LAUNCH_SYNC(kernel, blocks, threads, stream, ...) \
    ((void)(stream), ck_host_fibers((blocks), (threads), [=] { kernel(__VA_ARGS__); }))

struct ck_place { // where the running thread stands
    unsigned tid, nt, bid, nb;
};
extern thread_local ck_place ck_here;
int ck_host_loop(unsigned blocks, unsigned threads, const std::function<void()>& body);
int ck_host_fibers(unsigned blocks, unsigned threads, const std::function<void()>& body);
void ck_host_sync();
void ck_host_warp_sync();
uint64_t ck_host_shfl(uint64_t v, unsigned mask);

CK_DEVICE uint32_t ck_fresh(uint32_t v) { return v; }
CK_DEVICE unsigned ck_tid() { return ck_here.tid; }
CK_DEVICE unsigned ck_nt() { return ck_here.nt; }
CK_DEVICE unsigned ck_bid() { return ck_here.bid; }
CK_DEVICE unsigned ck_nb() { return ck_here.nb; }
CK_DEVICE void ck_sync() { ck_host_sync(); }
CK_DEVICE void ck_warp_sync() { ck_host_warp_sync(); }
CK_DEVICE uint32_t ck_shfl_xor(uint32_t v, unsigned m) { return uint32_t(ck_host_shfl(v, m)); }
CK_DEVICE uint64_t ck_shfl_xor(uint64_t v, unsigned m) { return ck_host_shfl(v, m); }
CK_DEVICE uint32_t ck_div(uint32_t n, uint64_t magic) {
    return magic ? uint32_t((unsigned __int128)magic * n >> 64) : n;
}
CK_DEVICE uint64_t ck_mul_high(uint64_t a, uint64_t b) { return uint64_t((unsigned __int128)a * b >> 64); }
CK_DEVICE uint32_t ck_ones(uint32_t v) { return uint32_t(__builtin_popcount(v)); }
CK_DEVICE float ck_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
CK_DEVICE uint32_t ck_funnel(uint32_t lo, uint32_t hi, unsigned bytes) {
    return uint32_t(((uint64_t)hi << 32 | lo) >> (bytes * 8));
}
template <class T> CK_DEVICE T ck_atomic_add(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
template <class T> CK_DEVICE void ck_atomic_min(T* p, T v) {
    T seen = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (v < seen && !__atomic_compare_exchange_n(p, &seen, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}
template <class T> CK_DEVICE void ck_atomic_max(T* p, T v) {
    T seen = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (v > seen && !__atomic_compare_exchange_n(p, &seen, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}
// What tests watch (ck_watch): which bytes may be read and written.
extern int ck_watches;
void ck_host_seen(uint64_t address, uint64_t bytes, bool store);

// a typed access, so that the sanitizer of undefined behaviour sees a misaligned one
template <class V> CK_DEVICE V ck_load(uint64_t address) {
    if (ck_watches) ck_host_seen(address, sizeof(V), false);
    return *reinterpret_cast<const V*>(address);
}
CK_DEVICE void ck_prefetch(uint64_t) {}
CK_DEVICE ck_v16 ck_load_kept(uint64_t address) { return ck_load<ck_v16>(address); }
template <class V> CK_DEVICE V ck_load_near(uint64_t address) { return ck_load<V>(address); }
template <class V> CK_DEVICE V ck_load_own(uint64_t address) { return ck_load<V>(address); }
template <class V> CK_DEVICE void ck_store(uint64_t address, V v) {
    if (ck_watches) ck_host_seen(address, sizeof(V), true);
    *reinterpret_cast<V*>(address) = v;
}

static inline int ck_fill_grid(int blocks, int per, uint64_t work) {
    if (blocks <= 0) blocks = 4 * (per == CK_EVERY ? 64 : per); // a device of 4 multiprocessors: several blocks, whatever the machine
    return int(work < uint64_t(blocks) ? work : uint64_t(blocks));
}
static inline int ck_last_error() { return 0; }
#endif

// -- floats by their bits ---------------------------------------------------------------------------------------------
CK_DEVICE float ck_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
CK_DEVICE uint32_t ck_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}
CK_DEVICE uint64_t ck_bits(double f) {
    uint64_t bits;
    memcpy(&bits, &f, 8);
    return bits;
}

constexpr uint32_t CK_INF = 0x7F800000u, CK_NAN = 0x7FC00000u, CK_SIGN = 0x80000000u;

// A float of `E` bits of exponent with this bias and `M` of mantissa, sign aside, below its infinities and NaNs: fp32 of it.
// Below the normal ones, 1.m * 2^e - 1 * 2^e is 0.m * 2^e.
template <int M, int BIAS> CK_DEVICE uint32_t ck_widen(uint32_t code) {
    constexpr uint32_t least = uint32_t(128 - BIAS) << 23; // 2^(1 - bias)
    if (code >> M) return (code << (23 - M)) + (uint32_t(127 - BIAS) << 23);
    return ck_bits(ck_float(least | code << (23 - M)) - ck_float(least));
}

// Back: the code of a finite fp32 >= 0, rounded; as large as it comes out, for the caller to compare with what there is.
// Below the normal ones the sum with 2^(24 - bias - M), whose last place is theirs, rounds.
template <int M, int BIAS> CK_DEVICE uint32_t ck_narrow(uint32_t value) {
    constexpr uint32_t least = uint32_t(128 - BIAS) << 23, magic = uint32_t(128 - BIAS + 23 - M) << 23;
    if (value < least) return ck_bits(ck_float(value) + ck_float(magic)) - magic;
    return ((value + ((1u << (22 - M)) - 1) + (value >> (23 - M) & 1)) >> (23 - M)) - (uint32_t(127 - BIAS) << M);
}

// Two at once, of finite values that the narrower type has without overflow: one instruction, or the same bits without it.
CK_DEVICE uint32_t ck_pair_bf16(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(ck_float(b)), "f"(ck_float(a)));
    return pair;
#else
    return (a + 0x7FFF + (a >> 16 & 1)) >> 16 | ((b + 0x7FFF + (b >> 16 & 1)) & 0xFFFF0000u);
#endif
}
CK_DEVICE uint32_t ck_pair_f16(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(ck_float(b)), "f"(ck_float(a)));
    return pair;
#else
    return (a >> 16 & 0x8000) | ck_narrow<10, 15>(a & ~CK_SIGN) | (b & CK_SIGN) | ck_narrow<10, 15>(b & ~CK_SIGN) << 16;
#endif
}
CK_DEVICE uint32_t ck_pair_e4m3(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(ck_float(b)), "f"(ck_float(a)));
    return pair;
#else
    return (a >> 24 & 0x80) | ck_narrow<3, 7>(a & ~CK_SIGN) | (b >> 16 & 0x8000) | ck_narrow<3, 7>(b & ~CK_SIGN) << 8;
#endif
}
CK_DEVICE void ck_widen_f16(uint32_t pair, uint32_t& a, uint32_t& b) {
#ifdef __CUDACC__
    float low, high;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(pair));
    a = ck_bits(low), b = ck_bits(high);
#else
    a = (pair & 0x8000) << 16 | ck_widen<10, 15>(pair & 0x7FFF);
    b = (pair & CK_SIGN) | ck_widen<10, 15>(pair >> 16 & 0x7FFF);
#endif
}

// -- walking a descriptor list ----------------------------------------------------------------------------------------

// The box that holds tile `tile`: the last with tile0 <= tile.
CK_DEVICE uint32_t ck_find(const ck_desc* list, uint32_t count, uint64_t tile) {
    uint32_t low = 0, high = count;
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (list[middle].tile0 <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// The offset of row number `row` on one side.
CK_DEVICE int64_t ck_row(const ck_desc& d, const int64_t* stride, uint32_t row) {
    const uint32_t upper = ck_div(row, d.div2), i2 = row - upper * d.ext[2];
    const uint32_t i0 = ck_div(upper, d.div1), i1 = upper - i0 * d.ext[1];
    return int64_t(i0) * stride[0] + int64_t(i1) * stride[1] + int64_t(i2) * stride[2];
}
