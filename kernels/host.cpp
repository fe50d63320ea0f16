// The host shim: runs the kernels on the CPU, and the runtime's functions over plain memory. For tests only: it is slower
// than NumPy at everything.
//
// Fibers begin by ucontext and switch by setjmp and longjmp, which spare the two system calls of swapcontext; under the address
// sanitizer, which must be told of each switch, by swapcontext. With -DCK_THREADS each thread of a block is a real one.
#include "portable.h"

#include <stdio.h>
#include <stdlib.h>

#include <chrono>
#include <memory>
#include <vector>

thread_local ck_place ck_here;

int ck_host_loop(unsigned blocks, unsigned threads, const std::function<void()>& body) {
    for (unsigned b = 0; b < blocks; ++b)
        for (unsigned t = 0; t < threads; ++t) {
            ck_here = {t, threads, b, blocks};
            body();
        }
    return cudaSuccess;
}

#ifdef CK_THREADS
// ---- threads --------------------------------------------------------------------------------------------------------
#include <barrier>
#include <thread>

namespace {
struct Block {
    std::barrier<> all;
    std::vector<std::unique_ptr<std::barrier<>>> warps;
    std::vector<uint64_t> slots;
    explicit Block(unsigned threads) : all(threads), slots(threads) {
        for (unsigned w = 0; w < threads; w += 32)
            warps.push_back(std::make_unique<std::barrier<>>(threads - w < 32 ? threads - w : 32));
    }
};
Block* running = nullptr;
} // namespace

int ck_host_fibers(unsigned blocks, unsigned threads, const std::function<void()>& body) {
    for (unsigned b = 0; b < blocks; ++b) {
        Block block(threads);
        running = &block;
        std::vector<std::thread> all;
        for (unsigned t = 0; t < threads; ++t)
            all.emplace_back([&, t] {
                ck_here = {t, threads, b, blocks};
                body();
                block.all.arrive_and_drop();
                block.warps[t / 32]->arrive_and_drop();
            });
        for (auto& thread : all) thread.join();
    }
    return cudaSuccess;
}
void ck_host_sync() { running->all.arrive_and_wait(); }
void ck_host_warp_sync() { running->warps[ck_here.tid / 32]->arrive_and_wait(); }
uint64_t ck_host_shfl(uint64_t v, unsigned mask) {
    running->slots[ck_here.tid] = v;
    ck_host_warp_sync();
    const uint64_t other = running->slots[ck_here.tid ^ mask];
    ck_host_warp_sync();
    return other;
}

#else
// ---- fibers ---------------------------------------------------------------------------------------------------------
#include <setjmp.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define CK_ASAN 1
#else
#define CK_ASAN 0
#endif

namespace {
constexpr size_t STACK = 128 << 10;

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    std::unique_ptr<char[]> stack;
    unsigned sync = 0, warp = 0; // barriers reached
    bool begun = false, done = false;
    void* fake = nullptr;
};

struct Crew { // the fibers of one block
    std::vector<Fiber> fibers;
    std::vector<uint64_t> slots;
    ucontext_t home;
    jmp_buf back;
    const std::function<void()>* body = nullptr;
    unsigned current = 0, threads = 0;
    const void* home_stack = nullptr;
    size_t home_size = 0;
    void* home_fake = nullptr;
};
thread_local Crew crew;

void yield() {
    Fiber& f = crew.fibers[crew.current];
    const ck_place mine = ck_here;
#if CK_ASAN
    __sanitizer_start_switch_fiber(&f.fake, crew.home_stack, crew.home_size);
    swapcontext(&f.start, &crew.home);
    __sanitizer_finish_switch_fiber(f.fake, &crew.home_stack, &crew.home_size);
#else
    if (_setjmp(f.at) == 0) _longjmp(crew.back, 1);
#endif
    ck_here = mine;
}

void enter() {
#if CK_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &crew.home_stack, &crew.home_size);
#endif
    (*crew.body)();
    Fiber& f = crew.fibers[crew.current];
    f.done = true;
#if CK_ASAN
    __sanitizer_start_switch_fiber(nullptr, crew.home_stack, crew.home_size);
    swapcontext(&f.start, &crew.home);
#else
    _longjmp(crew.back, 1);
#endif
}

void resume(Fiber& f) {
#if CK_ASAN
    __sanitizer_start_switch_fiber(&crew.home_fake, f.stack.get(), STACK);
    swapcontext(&crew.home, &f.start);
    __sanitizer_finish_switch_fiber(crew.home_fake, nullptr, nullptr);
#else
    if (_setjmp(crew.back) != 0) return;
    if (f.begun) _longjmp(f.at, 1);
    f.begun = true;
    setcontext(&f.start);
#endif
}

// Is the barrier that the fiber stands at reached by all of `from`..`to` that still run? Divergence is a fault of the kernel
// that a device would hang on or misread: it is told and ends the process.
bool passed(unsigned from, unsigned to, unsigned Fiber::*count, unsigned want) {
    for (unsigned t = from; t < to; ++t) {
        const Fiber& f = crew.fibers[t];
        if (f.*count >= want) continue; // it may be done since
        if (f.done) {
            fprintf(stderr, "ck host shim: thread %u has left block %u before a barrier that others wait at\n", t, ck_here.bid);
            abort();
        }
        return false;
    }
    return true;
}
} // namespace

int ck_host_fibers(unsigned blocks, unsigned threads, const std::function<void()>& body) {
    if (crew.fibers.size() < threads) crew.fibers.resize(threads);
    crew.slots.assign(threads, 0);
    crew.threads = threads;
    crew.body = &body;
    for (unsigned b = 0; b < blocks; ++b) {
        for (unsigned t = 0; t < threads; ++t) {
            Fiber& f = crew.fibers[t];
            if (!f.stack) f.stack.reset(new char[STACK]);
            f.sync = f.warp = 0;
            f.begun = f.done = false;
            f.fake = nullptr;
            getcontext(&f.start);
            f.start.uc_stack.ss_sp = f.stack.get();
            f.start.uc_stack.ss_size = STACK;
            f.start.uc_link = nullptr;
            makecontext(&f.start, enter, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (unsigned t = 0; t < threads; ++t)
                if (!crew.fibers[t].done) {
                    crew.current = t;
                    ck_here = {t, threads, b, blocks};
                    resume(crew.fibers[t]);
                    left = left || !crew.fibers[t].done;
                }
        }
    }
    return cudaSuccess;
}

void ck_host_sync() {
    const unsigned want = ++crew.fibers[crew.current].sync;
    do yield();
    while (!passed(0, crew.threads, &Fiber::sync, want));
}
void ck_host_warp_sync() {
    const unsigned want = ++crew.fibers[crew.current].warp;
    const unsigned first = ck_here.tid / 32 * 32, last = first + 32 < crew.threads ? first + 32 : crew.threads;
    do yield();
    while (!passed(first, last, &Fiber::warp, want));
}
uint64_t ck_host_shfl(uint64_t v, unsigned mask) {
    crew.slots[ck_here.tid] = v;
    ck_host_warp_sync();
    const uint64_t other = crew.slots[ck_here.tid ^ mask];
    ck_host_warp_sync();
    return other;
}
#endif

// ---- watching -------------------------------------------------------------------------------------------------------
// Tests say of ranges of memory, byte for byte, what kernels may read (1) and write (2), which they may once; what was written
// is marked (4), and accesses are counted by their width. A device has no such functions.
namespace {
struct Watched {
    uint64_t begin, bytes;
    uint8_t* map;
};
Watched ranges[8];
uint64_t complaints, complaint;
uint64_t accesses[2][5]; // loads and stores of 1, 2, 4, 8 and 16 bytes
} // namespace
int ck_watches = 0;

void ck_host_seen(uint64_t address, uint64_t bytes, bool store) {
    for (int r = 0; r < ck_watches; ++r) {
        const Watched& w = ranges[r];
        if (address - w.begin < w.bytes) __atomic_fetch_add(&accesses[store][__builtin_ctzll(bytes)], 1, __ATOMIC_RELAXED);
        for (uint64_t at = address; at < address + bytes; ++at) {
            if (at - w.begin >= w.bytes) continue;
            uint8_t& seen = w.map[at - w.begin];
            const bool legal = store ? (seen & 2) && !(seen & 4) : seen & 1;
            if (!legal && __atomic_fetch_add(&complaints, 1, __ATOMIC_RELAXED) == 0) complaint = at;
            if (store) seen |= 4;
        }
    }
}

// Watch one range more; false where there are too many.
CK_API int ck_watch(uint64_t begin, uint64_t bytes, uint8_t* map) {
    if (ck_watches == 8) return 0;
    ranges[ck_watches] = {begin, bytes, map};
    return ++ck_watches;
}
// Watch none any more. counts: loads of 1, 2, 4, 8 and 16 bytes that began in a range, then stores. Returns how many bytes were read or written that
// should not have been, and the first of them.
CK_API uint64_t ck_unwatch(uint64_t* first, uint64_t* counts) {
    const uint64_t all = complaints;
    *first = complaint;
    complaints = complaint = 0;
    memcpy(counts, accesses, sizeof accesses);
    memset(accesses, 0, sizeof accesses);
    ck_watches = 0;
    return all;
}

// ---- the runtime over plain memory ----------------------------------------------------------------------------------
CK_API uint32_t ck_abi(void) { return uint32_t(sizeof(ck_desc)) << 8 | CK_ABI_VERSION; }
CK_API const char* ck_error_name(int error) {
    return error == 0 ? "cudaSuccess" : error == 1 ? "cudaErrorInvalidValue" : error == 2 ? "cudaErrorMemoryAllocation" : "unknown";
}
CK_API const char* ck_error_text(int error) {
    return error == 0 ? "no error" : error == 1 ? "invalid argument" : error == 2 ? "out of memory" : "unknown error";
}
CK_API int ck_devices(int* count) { return *count = 1, cudaSuccess; }
CK_API int ck_info(int device, ck_device_info* out) {
    if (device != 0) return cudaErrorInvalidValue;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "host shim (CPU)");
    out->total_bytes = out->free_bytes = uint64_t(1) << 30;
    out->multiprocessors = 4;
    out->warp = 32;
    out->host = 1;
    return cudaSuccess;
}
CK_API int ck_use(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
CK_API int ck_alloc(void** out, size_t bytes) { // poisoned, as what a kernel must write in full; not a byte more than asked for
    *out = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (posix_memalign(out, 256, bytes) != 0) return cudaErrorMemoryAllocation;
    memset(*out, 0xA5, bytes);
    return cudaSuccess;
}
CK_API int ck_free(void* p) { return free(p), cudaSuccess; }
CK_API int ck_host_alloc(void** out, size_t bytes) { return ck_alloc(out, bytes); }
CK_API int ck_host_free(void* p) { return free(p), cudaSuccess; }
static int copy(void* to, const void* from, size_t bytes) {
    if (bytes) memcpy(to, from, bytes);
    return cudaSuccess;
}
CK_API int ck_upload(void* to, const void* from, size_t bytes, void*) { return copy(to, from, bytes); }
CK_API int ck_download(void* to, const void* from, size_t bytes, void*) { return copy(to, from, bytes); }
CK_API int ck_move(void* to, const void* from, size_t bytes, void*) { return copy(to, from, bytes); }
CK_API int ck_fill(void* to, int byte, size_t bytes, void*) {
    if (bytes) memset(to, byte, bytes);
    return cudaSuccess;
}
CK_API int ck_stream_create(void** out) { return *out = nullptr, cudaSuccess; }
CK_API int ck_stream_destroy(void*) { return cudaSuccess; }
CK_API int ck_stream_sync(void*) { return cudaSuccess; }
CK_API int ck_event_create(void** out) { return *out = new std::chrono::steady_clock::time_point, cudaSuccess; }
CK_API int ck_event_destroy(void* event) { return delete (std::chrono::steady_clock::time_point*)event, cudaSuccess; }
CK_API int ck_event_record(void* event, void*) {
    *(std::chrono::steady_clock::time_point*)event = std::chrono::steady_clock::now();
    return cudaSuccess;
}
CK_API int ck_event_elapsed(float* milliseconds, void* begin, void* end) {
    using point = std::chrono::steady_clock::time_point;
    *milliseconds = std::chrono::duration<float, std::milli>(*(point*)end - *(point*)begin).count();
    return cudaSuccess;
}
