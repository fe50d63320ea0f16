// box_copy: strided boxes of bytes from one place to another, thousands of boxes in one launch.
//
// For each box and each row (i0, i1, i2): dst_row[0:run] = src_row[0:run].   numpy: dst[box] = src[box]
// Map: block b of G takes the b-th of G equal ranges of tiles, finds its first box by bisection and walks on from there: no
// atomics, the same work for the same list. What a tile is, `op` says (descriptors.py chooses):
//     0 elements  rows_per_tile whole rows, shared out by vectors of 2^vlog bytes; divr: ck_magic(run >> vlog)
//     1 spans     rows_per_tile whole rows, each by a group of 2^flags threads; any alignment
//     2 pieces    `aux` bytes (a multiple of 16) of one of the long rows; any alignment; divr: ck_magic(tiles_per_row)
// A span or piece whose sides lie differently on the 16-byte grid is read by aligned loads of two neighbours that are shifted
// into one aligned store. Its ends are moved by bytes, or by two bytes where vlog allows.
// Boxes may not overlap where one is written: overlap.py refuses that. Nothing is read or written outside the runs. Fewer
// than 2^32 rows and tiles a box; runs and strides of any size.
// Bound: memory, 2 bytes moved a byte; GB/s by card in kernels/README.md.
#define CK_STORE_HINT ".cs" // nobody reads it again here
#include "portable.h"

namespace {

constexpr int THREADS = 256;
#ifndef CK_COPY_LOADS // loads that a thread has in flight; the bench builds others
#define CK_COPY_LOADS 4
#endif
constexpr int LOADS = CK_COPY_LOADS;
enum { ELEMENTS, SPANS, PIECES };

// -- elements ---------------------------------------------------------------------------------------------------------
// FLAT: one strided level, so that a row's place is one product.
template <bool FLAT> CK_DEVICE int64_t row_offset(const ck_desc& d, const int64_t* stride, uint32_t row) {
    return FLAT ? int64_t(row) * stride[2] : ck_row(d, stride, row);
}

template <class V, bool FLAT> CK_DEVICE void copy_elements(const ck_desc& box, uint32_t first, uint32_t rows, uint32_t tid) {
    const ck_desc d = box; // in registers, as far as this path needs it
    constexpr int AT_ONCE = !FLAT ? 2 : sizeof(V) == 16 ? LOADS : 8; // of narrow ones more
    const uint32_t width = uint32_t(d.run / sizeof(V)), count = rows * width, step = ck_fresh(ck_nt());
    for (uint32_t k = tid; k < count; k += AT_ONCE * step) {
        V v[AT_ONCE] = {};
        uint64_t to[AT_ONCE] = {};
        CK_UNROLL
        for (int u = 0; u < AT_ONCE; ++u) {
            const uint32_t row = ck_div(k + u * step, d.divr); // beyond the last it is computed and not used
            const uint32_t column = (k + u * step - row * width) * uint32_t(sizeof(V));
            to[u] = d.dst + row_offset<FLAT>(d, d.dstr, first + row) + column;
            const uint64_t from = d.src + row_offset<FLAT>(d, d.sstr, first + row) + column;
            if (k + u * step < count) v[u] = ck_load<V>(from);
        }
        CK_UNROLL
        for (int u = 0; u < AT_ONCE; ++u)
            if (k + u * step < count) ck_store<V>(to[u], v[u]);
    }
}

template <bool FLAT> CK_DEVICE void copy_by_width(const ck_desc& d, uint32_t first, uint32_t rows, uint32_t tid) {
    switch (d.vlog) {
    case 4: copy_elements<ck_v16, FLAT>(d, first, rows, tid); break;
    case 3: copy_elements<ck_v8, FLAT>(d, first, rows, tid); break;
    case 2: copy_elements<uint32_t, FLAT>(d, first, rows, tid); break;
    case 1: copy_elements<uint16_t, FLAT>(d, first, rows, tid); break;
    default: copy_elements<uint8_t, FLAT>(d, first, rows, tid);
    }
}

// -- spans ------------------------------------------------------------------------------------------------------------
// Both sides lie alike on the 16-byte grid.
CK_DEVICE void copy_vectors(uint64_t src, uint64_t dst, uint32_t count, uint32_t lane, uint32_t lanes) {
    for (uint32_t k = lane; k < count; k += LOADS * lanes) {
        ck_v16 v[LOADS] = {};
        CK_UNROLL
        for (int u = 0; u < LOADS; ++u)
            if (k + u * lanes < count) v[u] = ck_load<ck_v16>(src + uint64_t(k + u * lanes) * 16);
        CK_UNROLL
        for (int u = 0; u < LOADS; ++u)
            if (k + u * lanes < count) ck_store<ck_v16>(dst + uint64_t(k + u * lanes) * 16, v[u]);
    }
}

// The 16 bytes that begin `shift` (1..15) bytes into a.
CK_DEVICE ck_v16 shifted(const ck_v16& a, const ck_v16& b, uint32_t shift) {
    const bool two = shift & 8, one = shift & 4;
    const uint32_t bytes = shift & 3;
    const uint32_t t0 = two ? a.z : a.x, t1 = two ? a.w : a.y, t2 = two ? b.x : a.z, t3 = two ? b.y : a.w,
                   t4 = two ? b.z : b.x, t5 = two ? b.w : b.y;
    const uint32_t w0 = one ? t1 : t0, w1 = one ? t2 : t1, w2 = one ? t3 : t2, w3 = one ? t4 : t3, w4 = one ? t5 : t4;
    return {ck_funnel(w0, w1, bytes), ck_funnel(w1, w2, bytes), ck_funnel(w2, w3, bytes), ck_funnel(w3, w4, bytes)};
}

// dst is aligned, src lies `shift` bytes behind the grid: the loads are of [src - shift, src - shift + 16 * (count + 1)).
CK_DEVICE void copy_shifted(uint64_t src, uint64_t dst, uint32_t count, uint32_t shift, uint32_t lane, uint32_t lanes) {
    const uint64_t base = src - shift;
    for (uint32_t k = lane; k < count; k += 2 * lanes) {
        ck_v16 a[2] = {}, b[2] = {};
        CK_UNROLL
        for (int u = 0; u < 2; ++u)
            if (k + u * lanes < count) {
                a[u] = ck_load_kept(base + uint64_t(k + u * lanes) * 16);
                b[u] = ck_load_kept(base + uint64_t(k + u * lanes) * 16 + 16);
            }
        CK_UNROLL
        for (int u = 0; u < 2; ++u)
            if (k + u * lanes < count) ck_store<ck_v16>(dst + uint64_t(k + u * lanes) * 16, shifted(a[u], b[u], shift));
    }
}

// The first `head` bytes and those from `from` to `count`.
template <class V>
CK_DEVICE void copy_ends(uint64_t src, uint64_t dst, uint32_t head, uint32_t from, uint32_t count, uint32_t lane, uint32_t lanes) {
    const uint32_t left = (head + count - from) / sizeof(V);
    for (uint32_t k = lane; k < left; k += lanes) {
        const uint32_t at = k * sizeof(V) < head ? k * sizeof(V) : k * sizeof(V) - head + from;
        ck_store<V>(dst + at, ck_load<V>(src + at));
    }
}

// `count` bytes from anywhere to anywhere, by `lanes` threads of which this is number `lane`. before, after: how many bytes
// beside them may be read, as far as 16. even: both addresses and the count are.
CK_DEVICE void copy_span(uint64_t src, uint64_t dst, uint32_t count, uint32_t before, uint32_t after, bool even, uint32_t lane,
                         uint32_t lanes) {
    const uint32_t shift = uint32_t(src - dst) & 15;
    uint32_t head = uint32_t(0 - dst) & 15;
    if (shift > head + before) head += 16; // the first aligned load begins `shift` bytes before the first whole vector
    if (head > count) head = count;
    uint32_t vectors = (count - head) / 16;
    // the second load of the last vector ends 16 - shift bytes after it
    if (shift && vectors && (count - head) % 16 + after < 16 - shift) --vectors;
    if (shift)
        copy_shifted(src + head, dst + head, vectors, shift, lane, lanes);
    else
        copy_vectors(src + head, dst + head, vectors, lane, lanes);
    if (even)
        copy_ends<uint16_t>(src, dst, head, head + vectors * 16, count, lane, lanes);
    else
        copy_ends<uint8_t>(src, dst, head, head + vectors * 16, count, lane, lanes);
}

// A tile of spans, each by 2^flags threads, or of one piece of a row, by all. Pieces are cut on the 16-byte grid of dst, so
// that only the ends of a row are odd.
CK_DEVICE void copy_spans(const ck_desc& box, uint32_t tile, uint32_t tid) {
    const ck_desc d = box;
    const bool whole = d.op == SPANS;
    const uint32_t row0 = whole ? tile * d.rows_per_tile : ck_div(tile, d.divr);
    const uint32_t piece = whole ? 0 : tile - row0 * d.tiles_per_row;
    const uint32_t rows = d.rows - row0 < d.rows_per_tile ? d.rows - row0 : d.rows_per_tile;
    const uint32_t lanes = whole ? 1u << d.flags : ck_nt(), group = whole ? tid >> d.flags : 0;
    for (uint32_t row = group; row < rows; row += whole ? ck_nt() >> d.flags : 1) {
        const uint64_t src = d.src + ck_row(d, d.sstr, row0 + row), dst = d.dst + ck_row(d, d.dstr, row0 + row);
        const uint64_t begin = piece ? uint64_t(piece) * d.aux - (dst & 15) : 0;
        const uint64_t end = piece + 1 < d.tiles_per_row ? uint64_t(piece + 1) * d.aux - (dst & 15) : d.run;
        copy_span(src + begin, dst + begin, uint32_t(end - begin), begin < 16 ? uint32_t(begin) : 16,
                  d.run - end < 16 ? uint32_t(d.run - end) : 16, d.vlog > 0, tid - group * lanes, lanes);
    }
}

// -- the walk ---------------------------------------------------------------------------------------------------------
CK_DEVICE void copy_tile(const ck_desc& d, uint32_t tile) {
    const uint32_t tid = ck_fresh(ck_tid());
    if (d.op != ELEMENTS) return copy_spans(d, tile, tid);
    const uint32_t first = tile * d.rows_per_tile;
    const uint32_t rows = d.rows - first < d.rows_per_tile ? d.rows - first : d.rows_per_tile;
    if (d.ext[2] == d.rows)
        copy_by_width<true>(d, first, rows, tid);
    else
        copy_by_width<false>(d, first, rows, tid);
}

CK_KERNEL(THREADS, 3) void box_copy(const ck_desc* list, uint32_t count, uint64_t tiles, uint64_t each, uint32_t more) {
    uint64_t tile = each * ck_bid() + (ck_bid() < more ? ck_bid() : more);
    const uint64_t end = tile + each + (ck_bid() < more);
    uint32_t number = ck_find(list, count, tile);
    while (tile < end) {
        const ck_desc& d = list[number++];
        if (number < count && ck_tid() < 5) ck_prefetch(uint64_t(list + number) + 32 * ck_tid()); // the next one, for small boxes
        const uint64_t start = d.tile0, next = number < count ? list[number].tile0 : tiles;
        const uint32_t stop = uint32_t((next < end ? next : end) - start);
        for (uint32_t t = uint32_t(tile - start); t < stop; ++t) copy_tile(d, t);
        tile = start + stop;
    }
}

} // namespace

CK_API int ck_box_copy(const ck_desc* list, uint32_t count, uint64_t tiles, int blocks, int threads, void* stream) {
    if (tiles == 0) return cudaSuccess;
    if (count == 0 || threads < 0 || threads % 32 || threads > THREADS) return cudaErrorInvalidValue;
    if (threads == 0) threads = 128;
    // else twice as many as a multiprocessor holds: no waiting for the last
    blocks = ck_fill_grid(blocks, ck_long(tiles, count) ? CK_EVERY : 1536 / threads, tiles);
    if (blocks == 0) return ck_last_error();
    return CK_LAUNCH(box_copy, blocks, threads, stream, list, count, tiles, tiles / uint64_t(blocks),
                     uint32_t(tiles % uint64_t(blocks)));
}
