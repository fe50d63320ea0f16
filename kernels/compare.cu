// compare: the two sides of strided boxes held against each other, thousands of boxes in one launch; or one side asked for what is
// not finite.
//
// For each box, with a and b its elements in row-major order (rows, then the run), the record of number `aux` takes up:
//     numpy: differ = a.view(uint) != b.view(uint)        elements += differ.sum(); first = min(first, flatnonzero(differ)[0])
//            line = lambda x: where(x & sign, ~x, x | sign)               ulp = max(ulp, abs(line(a) - line(b)))
//            gap = abs(float64(a) - float64(b))[differ]                   gap = max(gap, gap[isfinite(gap)])
//     and how many of those gaps are finite, how many pairs are both NaN, and how many elements of either side (all, not only
//     those that differ) are NaN or infinite, or bytes of a BOOL other than 0 and 1. Integers are compared as integers in `ulp`;
//     CK_BYTES has neither ulp nor gap.
// Map: a tile is 32 KiB of a long row or as many whole rows as make that; block b of G takes the b-th of G equal ranges of tiles.
// A thread sums up for itself, a warp once a box, and warps by integer atomics: the same numbers whatever the order.
// Any run and any alignment: 16 bytes of either side at once (`vlog` 4: by one aligned load), nothing read outside the runs.
// run: bytes. op: ck_kind. flags: 1 where there is only src. divr: ck_magic(tiles_per_row) where a row is cut, else of the
// 16-byte units of a row, whole ones for vlog 4, else begun ones. Fewer than 2^32 tiles a box.
// Bound: memory, 1 byte moved a byte of either side, while little differs; GB/s by card in kernels/README.md.
#include "floats.h"
#include "span.h"

namespace {

constexpr uint32_t TILE = 32768; // bytes; `comparisons.py` cuts by the same number
constexpr int THREADS = 256;
constexpr int HELD = 3; // blocks that a multiprocessor holds

struct Found {
    uint64_t first = ~uint64_t(0), ulp = 0, gap = 0;
    uint32_t elements = 0, finite = 0, nans = 0, bad_left = 0, bad_right = 0; // a thread's share of a box is below 2^32
};

// What a type's elements are asked for.
struct Kind {
    uint32_t mask, want; // an element is NaN or infinite where element & mask == want
    bool boolean, real, whole;
    uint64_t flip; // what orders bits as integers, beside the sign of floats
};

CK_DEVICE Kind kind_of(uint32_t op) {
    switch (op) {
    case CK_F64: return {0x7FF00000, 0x7FF00000, false, true, true, 0};
    case CK_F32: return {0x7F800000, 0x7F800000, false, true, true, 0};
    case CK_BF16: return {0x7F807F80, 0x7F807F80, false, true, true, 0};
    case CK_F16: return {0x7C007C00, 0x7C007C00, false, true, true, 0};
    case CK_E4M3: return {0x7F7F7F7F, 0x7F7F7F7F, false, true, true, 0};
    case CK_E5M2: return {0x7C7C7C7C, 0x7C7C7C7C, false, true, true, 0};
    case CK_E8M0: return {~0u, ~0u, false, true, true, 0};
    case CK_E4M3FNUZ:
    case CK_E5M2FNUZ: return {~0u, 0x80808080, false, true, true, 0};
    case CK_BOOL: return {0xFEFEFEFE, 0, true, false, true, 0};
    case CK_I8: return {0, ~0u, false, false, true, 0x80};
    case CK_I16: return {0, ~0u, false, false, true, 0x8000};
    case CK_I32: return {0, ~0u, false, false, true, 0x80000000};
    case CK_I64: return {0, ~0u, false, false, true, uint64_t(1) << 63};
    case CK_BYTES: return {0, ~0u, false, false, false, 0};
    default: return {0, ~0u, false, false, true, 0};
    }
}

// How many elements of a word are zero.
template <int ITEM> CK_DEVICE uint32_t zeros(uint32_t v) {
    if constexpr (ITEM >= 4) return v == 0;
    constexpr uint32_t low = ITEM == 2 ? 0x7FFF7FFF : 0x7F7F7F7F;
    return ck_ones(~(((v & low) + low) | v) & ~low);
}

// How many of the 16 bytes' elements are NaN or infinite, or no BOOLs.
template <int ITEM> CK_DEVICE uint32_t bad(const ck_v16& v, const Kind& kind) {
    const uint32_t x = (v.x & kind.mask) ^ kind.want, y = (v.y & kind.mask) ^ kind.want, z = (v.z & kind.mask) ^ kind.want,
                   w = (v.w & kind.mask) ^ kind.want;
    if constexpr (ITEM == 8) return (y == 0) + (w == 0); // the exponent is in the upper half
    const uint32_t count = zeros<ITEM>(x) + zeros<ITEM>(y) + zeros<ITEM>(z) + zeros<ITEM>(w);
    return kind.boolean ? 16 - count : count;
}

CK_DEVICE double real(uint32_t op, uint64_t v) {
    uint32_t lost = 0;
    switch (op) {
    case CK_F64: {
        double d;
        memcpy(&d, &v, 8);
        return d;
    }
    case CK_F32: return ck_float(uint32_t(v));
    case CK_BF16: return ck_float(uint32_t(v) << 16);
    case CK_F16: return ck_float(ck_f16().wide(uint16_t(v), lost));
    case CK_E4M3: return ck_float(ck_e4m3().wide(uint8_t(v), lost));
    case CK_E5M2: return ck_float(ck_e5m2().wide(uint8_t(v), lost));
    case CK_E8M0: return ck_float(ck_e8m0().wide(uint8_t(v), lost));
    case CK_E4M3FNUZ: return ck_float(ck_e4m3fnuz().wide(uint8_t(v), lost));
    case CK_E5M2FNUZ: return ck_float(ck_e5m2fnuz().wide(uint8_t(v), lost));
    case CK_BOOL: return v != 0;
    case CK_I8: return int8_t(v);
    case CK_I16: return int16_t(v);
    case CK_I32: return int32_t(v);
    case CK_I64: return double(int64_t(v));
    default: return double(v);
    }
}

// Two elements that differ.
template <int ITEM> CK_DEVICE void take_up(Found& found, uint32_t op, const Kind& kind, uint64_t a, uint64_t b, uint64_t index) {
    ++found.elements;
    if (index < found.first) found.first = index;
    if (!kind.whole) {
        ++found.finite;
        return;
    }
    const double u = real(op, a), v = real(op, b);
    const uint64_t bits = ck_bits(u - v) & ~(uint64_t(1) << 63);
    if (bits < uint64_t(0x7FF) << 52) {
        ++found.finite;
        if (bits > found.gap) found.gap = bits;
    }
    if (u != u && v != v) ++found.nans;
    constexpr uint64_t sign = uint64_t(1) << (ITEM * 8 - 1), all = ~uint64_t(0) >> (64 - ITEM * 8);
    if (kind.real) {
        a = a & sign ? ~a & all : a | sign;
        b = b & sign ? ~b & all : b | sign;
    } else {
        a ^= kind.flip;
        b ^= kind.flip;
    }
    const uint64_t ulp = a > b ? a - b : b - a;
    if (ulp > found.ulp) found.ulp = ulp;
}

CK_DEVICE bool same(const ck_v16& x, const ck_v16& y) {
    return !((x.x ^ y.x) | (x.y ^ y.y) | (x.z ^ y.z) | (x.w ^ y.w));
}

// 16 bytes of both sides that are not the same; index: of their first element in the box.
template <int ITEM>
CK_DEVICE void measure(Found& found, uint32_t op, const Kind& kind, const ck_v16& x, const ck_v16& y, uint64_t index) {
    constexpr uint64_t all = ~uint64_t(0) >> (64 - ITEM * 8);
    CK_ROLLED
    for (int half = 0; half < 2; ++half) {
        uint64_t a = half ? uint64_t(x.w) << 32 | x.z : uint64_t(x.y) << 32 | x.x;
        uint64_t b = half ? uint64_t(y.w) << 32 | y.z : uint64_t(y.y) << 32 | y.x;
        CK_ROLLED
        for (uint64_t at = index + half * (8 / ITEM); a != b; ++at) {
            if ((a ^ b) & all) take_up<ITEM>(found, op, kind, a & all, b & all, at);
            a = ITEM == 8 ? 0 : a >> (ITEM * 8 % 64);
            b = ITEM == 8 ? 0 : b >> (ITEM * 8 % 64);
        }
    }
}

// Rows of one tile, all places relative to them.
struct Rows {
    uint32_t first, count, length; // bytes of each that are the tile's
    uint64_t start;                // the first of these bytes in the run
};

// The units of rows on the 16-byte grid, whole ones: those that are the same are counted; true where a thread has others, which are
// `compare_each`'s work: what is rare must not hold registers here. FLAT: there is one row.
template <int ITEM, bool FLAT> CK_DEVICE bool compare_whole(const ck_desc& box, const Kind& kind, const Rows& rows, Found& found) {
    constexpr int LOADS = !FLAT ? 1 : CK_ROOMY ? 4 : 2; // of either side, in flight; the strides of rows take the registers
    const ck_desc d = box;
    const bool both = !(d.flags & 1);
    const uint32_t units = rows.length / 16, count = FLAT ? units : rows.count * units, step = ck_nt();
    const uint64_t src = d.src + (FLAT ? ck_row(d, d.sstr, rows.first) : 0) + rows.start;
    const uint64_t dst = d.dst + (FLAT ? ck_row(d, d.dstr, rows.first) : 0) + rows.start;
    uint32_t wrong = 0;
    bool differ = false;
    for (uint32_t k = ck_tid(); k < count; k += LOADS * step) {
        ck_v16 x[LOADS] = {}, y[LOADS] = {};
        CK_UNROLL
        for (int u = 0; u < LOADS; ++u)
            if (k + u * step < count) {
                const uint32_t n = k + u * step, row = FLAT ? 0 : ck_div(n, d.divr), at = (n - row * units) * 16;
                x[u] = ck_load<ck_v16>(src + (FLAT ? 0 : ck_row(d, d.sstr, rows.first + row)) + at);
                y[u] = x[u];
                if (both) y[u] = ck_load<ck_v16>(dst + (FLAT ? 0 : ck_row(d, d.dstr, rows.first + row)) + at);
            }
        CK_UNROLL
        for (int u = 0; u < LOADS; ++u)
            if (k + u * step < count) {
                const bool equal = same(x[u], y[u]);
                differ |= !equal;
                if (equal) wrong += bad<ITEM>(x[u], kind);
            }
    }
    found.bad_left += wrong;
    found.bad_right += wrong;
    return differ;
}

// Units that lie where they will, numbers [from, end) of each row; those before number `counted` only where they differ.
template <int ITEM>
CK_DEVICE void compare_each(const ck_desc& box, const Rows& rows, uint32_t from, uint32_t end, uint32_t counted,
                            Found& found) {
    const uint32_t units = end - from;
    for (uint32_t k = ck_tid(); k < rows.count * units; k += ck_nt()) {
        const ck_desc& d = (&box)[ck_fresh(0)]; // read again for each, not held in registers
        const Kind kind = kind_of(d.op);
        const uint32_t row = rows.count == 1 ? 0 : units == 1 ? k : ck_div(k, d.divr), unit = from + k - row * units;
        const uint64_t at = rows.start + unit * 16, src = d.src + ck_row(d, d.sstr, rows.first + row);
        const ck_v16 x = span_take(src + at, src, src + d.run);
        ck_v16 y = x;
        if (!(d.flags & 1)) {
            const uint64_t dst = d.dst + ck_row(d, d.dstr, rows.first + row);
            y = span_take(dst + at, dst, dst + d.run);
        }
        const bool equal = same(x, y);
        if (equal && unit < counted) continue;
        found.bad_left += bad<ITEM>(x, kind);
        found.bad_right += bad<ITEM>(y, kind);
        if (!equal) measure<ITEM>(found, d.op, kind, x, y, (uint64_t(rows.first + row) * d.run + at) / ITEM);
    }
}

template <int ITEM> CK_DEVICE void compare_tile(const ck_desc& d, uint32_t tile, Found& found) {
    const Kind kind = kind_of(d.op);
    const bool cut = d.tiles_per_row > 1;
    Rows rows;
    rows.first = cut ? ck_div(tile, d.divr) : tile * d.rows_per_tile;
    rows.count = cut ? 1 : d.rows - rows.first < d.rows_per_tile ? d.rows - rows.first : d.rows_per_tile;
    rows.start = cut ? uint64_t(tile - rows.first * d.tiles_per_row) * TILE : 0;
    rows.length = uint32_t(d.run - rows.start < TILE ? d.run - rows.start : TILE);
    const uint32_t whole = d.vlog == 4 ? rows.length / 16 : 0;
    bool differ = false;
    if (whole && rows.count == 1)
        differ = compare_whole<ITEM, true>(d, kind, rows, found);
    else if (whole)
        differ = compare_whole<ITEM, false>(d, kind, rows, found);
    CK_ROLLED
    for (uint32_t rest = !differ; rest < 2; ++rest) { // whole units again where some differ, then what isn't whole
        const uint32_t from = rest ? whole : 0, end = rest ? (rows.length + 15) / 16 : whole;
        if (from < end) compare_each<ITEM>(d, rows, from, end, whole, found);
    }
}

CK_DEVICE int item_of(uint32_t op) {
    switch (op) {
    case CK_F64:
    case CK_I64:
    case CK_U64: return 8;
    case CK_F32:
    case CK_I32:
    case CK_U32: return 4;
    case CK_BF16:
    case CK_F16:
    case CK_I16:
    case CK_U16: return 2;
    default: return 1;
    }
}

CK_DEVICE uint64_t summed(uint64_t v) {
    for (int mask = 1; mask < 32; mask *= 2) v += ck_shfl_xor(v, mask);
    return v;
}
CK_DEVICE uint64_t largest(uint64_t v) {
    for (int mask = 1; mask < 32; mask *= 2) {
        const uint64_t other = ck_shfl_xor(v, mask);
        v = other > v ? other : v;
    }
    return v;
}

// A box's findings of a warp into its record. Mostly there are none, or none that differ.
CK_DEVICE void settle(const Found& found, ck_difference* record) {
    uint32_t any = (found.elements ? 1 : 0) | (found.bad_left || found.bad_right ? 2 : 0);
    for (int mask = 1; mask < 32; mask *= 2) any |= ck_shfl_xor(any, mask);
    const bool first_lane = ck_tid() % 32 == 0;
    if (any & 1) {
        const uint64_t elements = summed(found.elements), first = ~largest(~found.first), ulp = largest(found.ulp),
                       gap = largest(found.gap), finite = summed(found.finite), nans = summed(found.nans);
        if (first_lane) {
            ck_atomic_add(&record->elements, elements);
            ck_atomic_min(&record->first, first);
            ck_atomic_max(&record->ulp, ulp);
            ck_atomic_max(&record->gap, gap);
            ck_atomic_add(&record->finite, finite);
            ck_atomic_add(&record->nans, nans);
        }
    }
    if (any & 2) {
        const uint64_t left = summed(found.bad_left), right = summed(found.bad_right);
        if (first_lane) {
            ck_atomic_add(&record->bad_left, left);
            ck_atomic_add(&record->bad_right, right);
        }
    }
}

CK_KERNEL(THREADS, HELD)
void compare(const ck_desc* list, uint32_t count, uint64_t tiles, uint64_t each, uint32_t more, ck_difference* records) {
    uint64_t tile = each * ck_bid() + (ck_bid() < more ? ck_bid() : more);
    const uint64_t end = tile + each + (ck_bid() < more);
    uint32_t number = ck_find(list, count, tile);
    while (tile < end) {
        const ck_desc& d = list[number++];
        const uint64_t start = d.tile0, next = number < count ? list[number].tile0 : tiles, stop = next < end ? next : end;
        const int item = item_of(d.op);
        Found found;
        for (; tile < stop; ++tile) switch (item) {
            case 8: compare_tile<8>(d, uint32_t(tile - start), found); break;
            case 4: compare_tile<4>(d, uint32_t(tile - start), found); break;
            case 2: compare_tile<2>(d, uint32_t(tile - start), found); break;
            default: compare_tile<1>(d, uint32_t(tile - start), found);
            }
        settle(found, records + d.aux);
    }
}

} // namespace

CK_API int ck_compare(const ck_desc* list, uint32_t count, uint64_t tiles, ck_difference* records, int blocks, int threads,
                      void* stream) {
    if (tiles == 0) return cudaSuccess;
    if (count == 0 || threads < 0 || threads % 32 || threads > THREADS) return cudaErrorInvalidValue;
    blocks = ck_fill_grid(blocks, HELD, tiles);
    if (blocks == 0) return ck_last_error();
    return CK_LAUNCH_SYNC(compare, blocks, threads ? threads : THREADS, stream, list, count, tiles, tiles / uint64_t(blocks),
                          uint32_t(tiles % uint64_t(blocks)), records);
}
