// digest: XXH3-128 of the leaves of lines, thousands of lines in one launch.
//
// A line is `run` bytes at `src` (one row); leaf k of it are its bytes [k * 256 KiB, (k + 1) * 256 KiB), and 16 bytes at
// dst + 16 * k become their XXH3-128 (seed 0, default secret), upper half first, big-endian.
//     Python: xxhash.xxh3_128_digest(line[k * LEAF : (k + 1) * LEAF])
// Map: a leaf is the work of 4, 8, 16 or 32 threads (`lanes`); block b of G takes the b-th of G equal ranges of leaves. Any
// length, 0 and 1 included; any alignment of src (aligned loads of two neighbours, shifted); dst on 16 bytes. Nothing is read
// outside the line.
// Bound: memory, 1 byte moved a byte; GB/s by card in kernels/README.md.
//
// The algorithm is that of xxHash 0.8 (doc/xxhash_spec.md, "XXH3"). A long input is a chain of blocks of 1 KiB: 8 accumulators
// take up 16 stripes of 64 bytes, then they are scrambled. What a stripe adds does not depend on the accumulators, so the
// stripes of a block are summed side by side and only the scrambling, once a KiB, is a chain. A thread has two neighbouring
// accumulators (16 bytes of a stripe), and `lanes / 4` stripes are taken at once.
#include "span.h"

namespace {

constexpr uint64_t LEAF = 262144; // bytes; `run/digest.py` cuts by the same number
constexpr uint32_t BLOCK = 1024, STRIPE = 64, STRIPES = BLOCK / STRIPE;
constexpr int THREADS = 256;

constexpr uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9,
                   PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t PRIME_MX1 = 0x165667919E3779F9, PRIME_MX2 = 0x9FB21C651E98DF25;

CK_CONSTANT uint64_t SECRET[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82,
    0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5,
    0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
CK_CONSTANT uint64_t START[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

struct Pair { // two neighbouring 64-bit words
    uint64_t a, b;
};

// 8 bytes of the secret from byte `at` on.
CK_DEVICE uint64_t secret(uint32_t at) {
    const uint32_t bits = at % 8 * 8;
    const uint64_t low = SECRET[at / 8];
    return bits ? low >> bits | SECRET[at / 8 + 1] << (64 - bits) : low;
}
CK_DEVICE Pair words(const ck_v16& v) { return {uint64_t(v.y) << 32 | v.x, uint64_t(v.w) << 32 | v.z}; }
CK_DEVICE uint64_t folded(uint64_t a, uint64_t b) { return (a * b) ^ ck_mul_high(a, b); }
CK_DEVICE uint32_t swapped32(uint32_t v) { return v << 24 | (v & 0xFF00) << 8 | (v >> 8 & 0xFF00) | v >> 24; }
CK_DEVICE uint64_t swapped64(uint64_t v) { return uint64_t(swapped32(uint32_t(v))) << 32 | swapped32(uint32_t(v >> 32)); }

CK_DEVICE uint64_t avalanche(uint64_t v) {
    v = (v ^ v >> 37) * PRIME_MX1;
    return v ^ v >> 32;
}
CK_DEVICE uint64_t avalanche64(uint64_t v) {
    v = (v ^ v >> 33) * PRIME64_2;
    v = (v ^ v >> 29) * PRIME64_3;
    return v ^ v >> 32;
}

// -- up to 240 bytes: one thread --------------------------------------------------------------------------------------
CK_DEVICE uint64_t mixed(const Pair& data, uint32_t at) { return folded(data.a ^ secret(at), data.b ^ secret(at + 8)); }

CK_DEVICE void mix_two(Pair& sums, uint64_t one, uint64_t two, uint64_t end, uint32_t at) {
    const Pair x = words(span_pieces(one, end)), y = words(span_pieces(two, end));
    sums.a = (sums.a + mixed(x, at)) ^ (y.a + y.b);
    sums.b = (sums.b + mixed(y, at + 16)) ^ (x.a + x.b);
}

CK_DEVICE Pair short_hash(uint64_t src, uint32_t length) { // 0 to 16
    const uint64_t end = src + length;
    if (length == 0) return {avalanche64(secret(64) ^ secret(72)), avalanche64(secret(80) ^ secret(88))};
    const uint64_t first = words(span_pieces(src, end)).a;
    if (length <= 3) {
        const uint32_t begin = first & 0xFF, middle = first >> (length / 2 * 8) & 0xFF, last = first >> (length * 8 - 8) & 0xFF;
        const uint32_t all = last | length << 8 | begin << 16 | middle << 24;
        const uint32_t other = swapped32(all);
        const uint64_t s0 = SECRET[0], s1 = SECRET[1];
        return {avalanche64(uint32_t(s0 ^ s0 >> 32) ^ all), avalanche64(uint32_t(s1 ^ s1 >> 32) ^ (other << 13 | other >> 19))};
    }
    if (length <= 8) {
        const uint64_t last = words(span_pieces(end - 4, end)).a;
        const uint64_t v = (secret(16) ^ secret(24)) ^ (uint64_t(uint32_t(first)) | last << 32);
        const uint64_t by = PRIME64_1 + (length << 2);
        uint64_t low = v * by, high = ck_mul_high(v, by);
        high += low << 1;
        low ^= high >> 3;
        low = (low ^ low >> 35) * PRIME_MX2;
        return {low ^ low >> 28, avalanche(high)};
    }
    const uint64_t last = words(span_pieces(end - 8, end)).a;
    const uint64_t v = secret(32) ^ secret(40) ^ first ^ last, w = secret(48) ^ secret(56) ^ last;
    uint64_t low = v * PRIME64_1 + (uint64_t(length - 1) << 54);
    const uint64_t high = ck_mul_high(v, PRIME64_1) + w + uint64_t(uint32_t(w)) * (PRIME32_2 - 1);
    low ^= swapped64(high);
    return {avalanche(low * PRIME64_2), avalanche(ck_mul_high(low, PRIME64_2) + high * PRIME64_2)};
}

CK_DEVICE Pair middle_hash(uint64_t src, uint32_t length) { // 17 to 240
    const uint64_t end = src + length;
    Pair sums = {length * PRIME64_1, 0};
    if (length <= 128) {
        for (uint32_t i = (length - 1) / 32 + 1; i-- > 0;) mix_two(sums, src + i * 16, end - i * 16 - 16, end, i * 32);
    } else {
        for (uint32_t i = 0; i < length / 32; ++i) {
            if (i == 4) sums = {avalanche(sums.a), avalanche(sums.b)};
            mix_two(sums, src + i * 32, src + i * 32 + 16, end, i < 4 ? i * 32 : i * 32 - 125);
        }
        if (length < 160) sums = {avalanche(sums.a), avalanche(sums.b)};
        mix_two(sums, end - 16, end - 32, end, 103);
    }
    const uint64_t high = sums.a * PRIME64_1 + sums.b * PRIME64_4 + length * PRIME64_2;
    return {avalanche(sums.a + sums.b), 0 - avalanche(high)};
}

// -- more: a group of LANES threads -----------------------------------------------------------------------------------
// What 16 bytes of a stripe add to their two accumulators.
CK_DEVICE void take_up(Pair& sums, const ck_v16& v, uint64_t s0, uint64_t s1) {
    const Pair data = words(v);
    const uint64_t x = data.a ^ s0, y = data.b ^ s1;
    sums.a += data.b + (x & 0xFFFFFFFF) * (x >> 32);
    sums.b += data.a + (y & 0xFFFFFFFF) * (y >> 32);
}

// The sums of all threads that have the same two accumulators.
template <int LANES> CK_DEVICE void gather(Pair& sums) {
    CK_UNROLL
    for (int mask = 4; mask < LANES; mask *= 2) {
        sums.a += ck_shfl_xor(sums.a, mask);
        sums.b += ck_shfl_xor(sums.b, mask);
    }
}

CK_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
CK_DEVICE uint64_t scrambled(uint64_t v, uint64_t s) { return (v ^ v >> 47 ^ s) * PRIME32_1; }

// The hash of [src, src + length) of a line, length > 240 (or 0: a group that only takes part in the exchanges).
template <int LANES> CK_DEVICE Pair long_hash(uint64_t src, uint32_t length, uint64_t begin, uint64_t end) {
    constexpr int AT_ONCE = LANES / 4, STEPS = STRIPES / AT_ONCE; // stripes a step, steps a block
    constexpr int LOADS = LANES < 16 ? 4 : 8;                     // 16-byte loads that a thread has in flight
    constexpr int N = STEPS < LOADS ? STEPS : LOADS, BLOCKS = LOADS / N; // vectors a block at once, blocks at once
    const uint32_t lane = ck_tid() % LANES, two = lane % 4 * 2, first = lane / 4; // accumulators, first stripe
    uint64_t s[STEPS + 1], t[STEPS]; // secrets of the steps; with one stripe a step the second is the next one's first
    CK_UNROLL
    for (int i = 0; i < STEPS; ++i) {
        s[i] = SECRET[first + i * AT_ONCE + two];
        t[i] = AT_ONCE > 1 || i + 1 == STEPS ? SECRET[first + i * AT_ONCE + two + 1] : 0;
    }
    s[STEPS] = 0;
    const uint64_t s0 = SECRET[16 + two], s1 = SECRET[17 + two];
    const uint32_t rounds = length ? (length - 1) / BLOCK : 0, shift = uint32_t(src) & 15;
    // In an unaligned line the first and the last vector have a neighbour outside: their blocks go the careful way.
    const bool first_edge = shift && length && src == begin, last_edge = shift && length && src + length + 16 > end;
    uint32_t most = rounds, safe = first_edge ? 1 : 0, unsafe = last_edge && rounds ? rounds - 1 : ~0u;
    CK_UNROLL
    for (int mask = LANES; mask < 32; mask *= 2) {
        most = larger(most, ck_shfl_xor(most, mask));
        safe = larger(safe, ck_shfl_xor(safe, mask));
        unsafe = ~larger(~unsafe, ~ck_shfl_xor(unsafe, mask));
    }
    Pair sums = {START[two], START[two + 1]};
    for (uint32_t round = 0; round < most;) {
        const uint64_t at = src + uint64_t(round) * BLOCK + lane * 16;
        if (round < safe || round + BLOCKS > unsafe) {
            Pair add = {0, 0};
            if (round < rounds)
                for (uint32_t stripe = first; stripe < STRIPES; stripe += AT_ONCE)
                    take_up(add, span_take(at + (stripe - first) * STRIPE, begin, end), SECRET[stripe + two], SECRET[stripe + two + 1]);
            gather<LANES>(add);
            if (round < rounds) sums = {scrambled(sums.a + add.a, s0), scrambled(sums.b + add.b, s1)};
            ++round;
            continue;
        }
        Pair add[BLOCKS] = {};
        CK_UNROLL
        for (int step = 0; step < STEPS; step += N) {
            ck_v16 v[BLOCKS][N] = {};
            if (shift == 0) {
                CK_UNROLL
                for (int b = 0; b < BLOCKS; ++b)
                    CK_UNROLL
                    for (int i = 0; i < N; ++i)
                        if (round + b < rounds) v[b][i] = ck_load<ck_v16>(at + b * BLOCK + (step + i) * AT_ONCE * STRIPE);
            } else {
                CK_UNROLL
                for (int b = 0; b < BLOCKS; ++b)
                    CK_UNROLL
                    for (int i = 0; i < N; ++i)
                        if (round + b < rounds) {
                            const uint64_t base = at - shift + b * BLOCK + (step + i) * AT_ONCE * STRIPE;
                            v[b][i] = span_shifted(ck_load_kept(base), ck_load_kept(base + 16), shift);
                        }
            }
            CK_UNROLL
            for (int b = 0; b < BLOCKS; ++b)
                CK_UNROLL
                for (int i = 0; i < N; ++i)
                    take_up(add[b], v[b][i], s[step + i], AT_ONCE > 1 || step + i + 1 == STEPS ? t[step + i] : s[step + i + 1]);
        }
        CK_UNROLL
        for (int b = 0; b < BLOCKS; ++b) {
            gather<LANES>(add[b]);
            if (round + b < rounds) sums = {scrambled(sums.a + add[b].a, s0), scrambled(sums.b + add[b].b, s1)};
        }
        round += BLOCKS;
    }
    // the last block: whole stripes short of the end, and the last 64 bytes as a stripe of their own
    Pair add = {0, 0};
    if (length) {
        const uint64_t from = src + uint64_t(rounds) * BLOCK;
        const uint32_t left = (length - rounds * BLOCK - 1) / STRIPE;
        for (uint32_t stripe = first; stripe < left; stripe += AT_ONCE)
            take_up(add, span_take(from + stripe * STRIPE + two * 8, begin, end), SECRET[stripe + two], SECRET[stripe + two + 1]);
        if (first == 0)
            take_up(add, span_take(src + length - STRIPE + two * 8, begin, end), secret(121 + two * 8), secret(129 + two * 8));
    }
    gather<LANES>(add);
    sums = {sums.a + add.a, sums.b + add.b};
    uint64_t low = folded(sums.a ^ secret(11 + two * 8), sums.b ^ secret(19 + two * 8));
    uint64_t high = folded(sums.a ^ secret(117 + two * 8), sums.b ^ secret(125 + two * 8));
    for (int mask = 1; mask < 4; mask *= 2) {
        low += ck_shfl_xor(low, mask);
        high += ck_shfl_xor(high, mask);
    }
    return {avalanche(low + length * PRIME64_1), avalanche(high + ~(length * PRIME64_2))};
}

template <int LANES> CK_KERNEL(THREADS, 2) void digest(const ck_desc* list, uint32_t count, uint64_t tiles, uint64_t each, uint32_t more) {
    const uint32_t groups = ck_nt() / LANES;
    const uint64_t from = each * ck_bid() + (ck_bid() < more ? ck_bid() : more), to = from + each + (ck_bid() < more);
    uint64_t src = 0, dst = 0, end = 0, tile0 = 0, next = 0;
    uint32_t number = 0;
    // all threads of a warp go as often round: they exchange values
    for (uint64_t base = from + ck_tid() / 32 * 32 / LANES; base < to; base += groups) {
        const uint64_t leaf = base + ck_tid() % 32 / LANES;
        uint32_t length = 0;
        uint64_t at = 0;
        if (leaf < to) {
            if (leaf >= next) {
                number = ck_find(list, count, leaf);
                const ck_desc& d = list[number];
                src = d.src;
                dst = d.dst;
                end = src + d.run;
                tile0 = d.tile0;
                next = number + 1 < count ? list[number + 1].tile0 : tiles;
            }
            at = src + (leaf - tile0) * LEAF;
            length = uint32_t(end - at < LEAF ? end - at : LEAF);
        }
        const bool small = length <= 240;
        Pair hash = long_hash<LANES>(at, small ? 0 : length, src, end);
        if (leaf < to && ck_tid() % LANES == 0) {
            if (small) hash = length <= 16 ? short_hash(at, length) : middle_hash(at, length);
            const ck_v16 out = {swapped32(uint32_t(hash.b >> 32)), swapped32(uint32_t(hash.b)),
                                swapped32(uint32_t(hash.a >> 32)), swapped32(uint32_t(hash.a))};
            ck_store(dst + (leaf - tile0) * 16, out);
        }
    }
}

} // namespace

CK_API int ck_digest(const ck_desc* list, uint32_t count, uint64_t tiles, int lanes, int blocks, int threads, void* stream) {
    if (tiles == 0) return cudaSuccess;
    if (lanes == 0) lanes = 32;
    if (threads == 0) threads = 64; // few, so that the leaves of a short list lie on many multiprocessors
    if (count == 0 || threads < 0 || threads % 32 || threads > THREADS) return cudaErrorInvalidValue;
    if (lanes != 4 && lanes != 8 && lanes != 16 && lanes != 32) return cudaErrorInvalidValue;
    blocks = ck_fill_grid(blocks, 8, (tiles - 1) / uint32_t(threads / lanes) + 1);
    if (blocks == 0) return ck_last_error();
    const uint64_t each = tiles / uint64_t(blocks);
    const uint32_t more = uint32_t(tiles % uint64_t(blocks));
    switch (lanes) {
    case 4: return CK_LAUNCH_SYNC(digest<4>, blocks, threads, stream, list, count, tiles, each, more);
    case 8: return CK_LAUNCH_SYNC(digest<8>, blocks, threads, stream, list, count, tiles, each, more);
    case 16: return CK_LAUNCH_SYNC(digest<16>, blocks, threads, stream, list, count, tiles, each, more);
    default: return CK_LAUNCH_SYNC(digest<32>, blocks, threads, stream, list, count, tiles, each, more);
    }
}
