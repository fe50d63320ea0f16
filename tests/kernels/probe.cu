// A kernel with every barrier that the shim has, for tests of the shim: each block sums its part of `in`, then of `in / 2`.
#include "portable.h"

namespace {
constexpr int THREADS = 128;

CK_KERNEL(THREADS) void probe(const uint64_t* in, uint64_t* out, uint64_t count) {
    CK_SHARED(uint64_t, part, THREADS / 32);
    for (unsigned round = 0; round < 2; ++round) {
        uint64_t sum = 0;
        for (uint64_t k = uint64_t(ck_bid()) * ck_nt() + ck_tid(); k < count; k += uint64_t(ck_nb()) * ck_nt())
            sum += in[k] >> round;
        for (unsigned m = 16; m; m /= 2) sum += ck_shfl_xor(sum, m);
        if (ck_tid() % 32 == 0) part[ck_tid() / 32] = sum;
        ck_sync(); // all parts are there
        if (ck_tid() == 0) {
            sum = 0;
            for (unsigned w = 0; w < ck_nt() / 32; ++w) sum += part[w];
            out[round * ck_nb() + ck_bid()] = sum;
        }
        ck_sync(); // the next round writes them again
    }
}
} // namespace

CK_API int ck_probe(const uint64_t* in, uint64_t* out, uint64_t count, int blocks, int threads, void* stream) {
    if (threads < 32 || threads > THREADS || threads % 32) return cudaErrorInvalidValue;
    return CK_LAUNCH_SYNC(probe, blocks, threads, stream, in, out, count);
}
