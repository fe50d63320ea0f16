// box_copy: strided boxes of bytes from one place to another, thousands of boxes in one launch.
//
// For each box and each row (i0, i1, i2): dst_row[0:run] = src_row[0:run].   numpy: dst[box] = src[box]
// Map: a tile is 32 KiB of a long row, or as many whole rows as make that; block b of G takes tiles [b*T/G, (b+1)*T/G),
// finds the first box by bisection and walks on from there: no atomics, the same work for the same list. Any run and any
// alignment; runs of 512 bytes or more are moved 16 bytes a thread whatever the alignment of the two sides (aligned loads,
// shifted into place), shorter ones at the width that both sides allow (`vlog`).
// Boxes may not overlap where one is written: the planner refuses that. Nothing is read or written outside the runs.
// Bound: memory, 2 bytes moved a byte; GB/s by card in kernels/README.md.
#include "portable.h"

namespace {

constexpr uint64_t TILE = 32768; // bytes; `descriptors.py` cuts by the same number
constexpr int THREADS = 512;
constexpr uint32_t WARP_ROW = 512; // rows from here on are a warp's work, shorter ones are shared out by element

CK_DEVICE void copy_bytes(uint64_t src, uint64_t dst, uint32_t count, uint32_t lane, uint32_t lanes) {
    for (uint32_t k = lane; k < count; k += lanes) ck_store<uint8_t>(dst + k, ck_load<uint8_t>(src + k));
}

// `count` vectors, four loads in flight.
template <class V> CK_DEVICE void copy_vectors(uint64_t src, uint64_t dst, uint32_t count, uint32_t lane, uint32_t lanes) {
    uint32_t k = lane;
    for (; k + 3 * lanes < count; k += 4 * lanes) {
        V v[4];
        CK_UNROLL
        for (int u = 0; u < 4; ++u) v[u] = ck_load<V>(src + uint64_t(k + u * lanes) * sizeof(V));
        CK_UNROLL
        for (int u = 0; u < 4; ++u) ck_store<V>(dst + uint64_t(k + u * lanes) * sizeof(V), v[u]);
    }
    for (; k < count; k += lanes) ck_store<V>(dst + uint64_t(k) * sizeof(V), ck_load<V>(src + uint64_t(k) * sizeof(V)));
}

// The 16 bytes that begin `shift` (1..15) bytes into a.
CK_DEVICE ck_v16 shifted(const ck_v16& a, const ck_v16& b, uint32_t shift) {
    const uint32_t words = shift / 4, bytes = shift % 4;
    const uint32_t w0 = words == 0 ? a.x : words == 1 ? a.y : words == 2 ? a.z : a.w;
    const uint32_t w1 = words == 0 ? a.y : words == 1 ? a.z : words == 2 ? a.w : b.x;
    const uint32_t w2 = words == 0 ? a.z : words == 1 ? a.w : words == 2 ? b.x : b.y;
    const uint32_t w3 = words == 0 ? a.w : words == 1 ? b.x : words == 2 ? b.y : b.z;
    const uint32_t w4 = words == 0 ? b.x : words == 1 ? b.y : words == 2 ? b.z : b.w;
    return {ck_funnel(w0, w1, bytes), ck_funnel(w1, w2, bytes), ck_funnel(w2, w3, bytes), ck_funnel(w3, w4, bytes)};
}

// src lies `shift` bytes off dst's 16-byte grid: aligned loads of two neighbours, one aligned store. dst is aligned; the
// loads stay within [src - shift, src - shift + 16 * (count + 1)), which the caller knows to be inside the run.
CK_DEVICE void copy_shifted(uint64_t src, uint64_t dst, uint32_t count, uint32_t shift, uint32_t lane, uint32_t lanes) {
    const uint64_t base = src - shift;
    uint32_t k = lane;
    for (; k + lanes < count; k += 2 * lanes) {
        ck_v16 a[2], b[2];
        CK_UNROLL
        for (int u = 0; u < 2; ++u) {
            a[u] = ck_load<ck_v16>(base + uint64_t(k + u * lanes) * 16);
            b[u] = ck_load<ck_v16>(base + uint64_t(k + u * lanes) * 16 + 16);
        }
        CK_UNROLL
        for (int u = 0; u < 2; ++u) ck_store<ck_v16>(dst + uint64_t(k + u * lanes) * 16, shifted(a[u], b[u], shift));
    }
    for (; k < count; k += lanes) {
        const ck_v16 a = ck_load<ck_v16>(base + uint64_t(k) * 16), b = ck_load<ck_v16>(base + uint64_t(k) * 16 + 16);
        ck_store<ck_v16>(dst + uint64_t(k) * 16, shifted(a, b, shift));
    }
}

// `count` bytes from anywhere to anywhere, by a group of threads of which this is number `lane`.
CK_DEVICE void copy_span(uint64_t src, uint64_t dst, uint32_t count, uint32_t lane, uint32_t lanes) {
    const uint32_t shift = uint32_t(src - dst) & 15;
    uint32_t head = uint32_t(0 - dst) & 15;
    if (shift && head < shift) head += 16; // the first aligned load must not begin before the run
    if (head > count) head = count;
    copy_bytes(src, dst, head, lane, lanes);
    uint32_t vectors = (count - head) / 16;
    if (shift == 0) {
        copy_vectors<ck_v16>(src + head, dst + head, vectors, lane, lanes);
    } else {
        // the second load of the last vector reaches 16 - shift bytes further
        if (vectors && count - head - vectors * 16 < 16 - shift) --vectors;
        copy_shifted(src + head, dst + head, vectors, shift, lane, lanes);
    }
    const uint32_t moved = head + vectors * 16;
    copy_bytes(src + moved, dst + moved, count - moved, lane, lanes);
}

// Short rows, `rows` of them from number `first` on, element by element of width V.
template <class V> CK_DEVICE void copy_rows(const ck_desc& d, uint32_t first, uint32_t rows) {
    const uint32_t width = uint32_t(d.run / sizeof(V)), count = rows * width, step = ck_nt();
    uint32_t k = ck_tid();
    for (; k + 3 * step < count; k += 4 * step) {
        V v[4];
        uint64_t to[4];
        CK_UNROLL
        for (int u = 0; u < 4; ++u) {
            const uint32_t row = ck_div(k + u * step, d.divr), column = k + u * step - row * width;
            v[u] = ck_load<V>(d.src + ck_row(d, d.sstr, first + row) + uint64_t(column) * sizeof(V));
            to[u] = d.dst + ck_row(d, d.dstr, first + row) + uint64_t(column) * sizeof(V);
        }
        CK_UNROLL
        for (int u = 0; u < 4; ++u) ck_store<V>(to[u], v[u]);
    }
    for (; k < count; k += step) {
        const uint32_t row = ck_div(k, d.divr), column = k - row * width;
        const V v = ck_load<V>(d.src + ck_row(d, d.sstr, first + row) + uint64_t(column) * sizeof(V));
        ck_store<V>(d.dst + ck_row(d, d.dstr, first + row) + uint64_t(column) * sizeof(V), v);
    }
}

CK_DEVICE void copy_tile(const ck_desc& d, uint64_t tile) {
    if (d.tiles_per_row > 1) {
        const uint32_t row = uint32_t(tile / d.tiles_per_row); // 64 bits, but once a tile
        const uint64_t at = (tile - uint64_t(row) * d.tiles_per_row) * TILE;
        const uint32_t count = uint32_t(d.run - at < TILE ? d.run - at : TILE);
        copy_span(d.src + ck_row(d, d.sstr, row) + at, d.dst + ck_row(d, d.dstr, row) + at, count, ck_tid(), ck_nt());
        return;
    }
    const uint32_t first = uint32_t(tile) * d.rows_per_tile;
    const uint32_t rows = d.rows - first < d.rows_per_tile ? d.rows - first : d.rows_per_tile;
    if (d.run >= WARP_ROW) {
        for (uint32_t row = first + ck_tid() / 32; row < first + rows; row += ck_nt() / 32)
            copy_span(d.src + ck_row(d, d.sstr, row), d.dst + ck_row(d, d.dstr, row), uint32_t(d.run), ck_tid() % 32, 32);
        return;
    }
    switch (d.vlog) {
    case 4: copy_rows<ck_v16>(d, first, rows); break;
    case 3: copy_rows<ck_v8>(d, first, rows); break;
    case 2: copy_rows<uint32_t>(d, first, rows); break;
    case 1: copy_rows<uint16_t>(d, first, rows); break;
    default: copy_rows<uint8_t>(d, first, rows);
    }
}

CK_KERNEL(THREADS) void box_copy(const ck_desc* list, uint32_t count, uint64_t tiles) {
    uint64_t tile = tiles * ck_bid() / ck_nb();
    const uint64_t end = tiles * (ck_bid() + 1) / ck_nb();
    if (tile >= end) return;
    uint32_t number = ck_find(list, count, tile);
    ck_desc d = list[number];
    for (;;) {
        const uint64_t next = number + 1 < count ? list[number + 1].tile0 : tiles;
        for (const uint64_t stop = next < end ? next : end; tile < stop; ++tile) copy_tile(d, tile - d.tile0);
        if (tile >= end) return;
        d = list[++number];
    }
}

} // namespace

CK_API int ck_box_copy(const ck_desc* list, uint32_t count, uint64_t tiles, int blocks, int threads, void* stream) {
    if (tiles == 0) return cudaSuccess;
    if (count == 0 || threads < 0 || threads % 32 || threads > THREADS) return cudaErrorInvalidValue;
    blocks = ck_fill_grid(blocks, 4, tiles);
    if (blocks == 0) return ck_last_error();
    return CK_LAUNCH(box_copy, blocks, threads ? threads : THREADS, stream, list, count, tiles);
}
