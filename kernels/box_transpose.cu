// box_transpose: boxes of two dims whose rows become columns, in batches, thousands of boxes in one launch.
//
// For each box and each (b, i, j) of ext = (batch, rows, columns), items of 2^op bytes (1 to 16):
//     item at dst + b*dstr[0] + i*item + j*dstr[2] = item at src + b*sstr[0] + i*sstr[1] + j*item
//     numpy: dst[b, j, i] = src[b, i, j]
// Map: blocks share the tiles as in box_copy. A tile is a square of 128, 64, 64, 32 or 16 items, read row by row into shared
// memory and written column by column, 16 bytes a thread on both sides: two buffers in turn, one barrier a tile, and
// the next tile of the box is on its way while one is written. Within
// shared memory 16 bytes are left free after each 16/item rows, so that neither side meets itself in a bank.
// vlog, flags: log2 of the width of the source and of the target side: 4 where its strides are multiples of 16, else op.
// aux: items by which the grid of tiles begins before the box, columns | rows << 16, so that tiles lie on 16 bytes whatever
// the address. What hangs over, and a side that is not wide, is moved item by item.
// tiles_per_row, rows_per_tile: tiles over the columns, and over the rows; div1: ck_magic of the second, div2 of the first.
// Boxes may not overlap where one is written. Nothing outside the boxes is touched. Extents up to 2^31, strides of any size.
// Bound: memory, 2 bytes moved a byte; GB/s by card in kernels/README.md.
#include "portable.h"

namespace {

constexpr int THREADS = 256;
constexpr int SINGLES = 4;              // items that a thread has in flight where it moves them one by one
constexpr uint32_t BUFFER = 16640 / 16; // vectors of the largest tile with what is left free

template <class T> struct Shape {
    static constexpr uint32_t ITEM = sizeof(T), PER = 16 / ITEM; // items a vector
    static constexpr uint32_t EDGE = ITEM == 1 ? 128 : ITEM <= 4 ? 64 : 256 / ITEM;
    static constexpr uint32_t ACROSS = EDGE / PER, VECTORS = EDGE * ACROSS; // vectors a row, and a tile
    static constexpr uint32_t PITCH = EDGE * ITEM;
};

struct Tile { // where a tile lies, and how much of it lies in the box: items [low, high) of rows and of columns
    uint64_t src, dst;
    int64_t by_row, by_column; // of src, of dst
    uint32_t row_low, row_high, column_low, column_high;
    bool wide_source, wide_target;
};

// Is the vector of items [at, at + per) wholly inside [low, high)?
CK_DEVICE bool within(uint32_t at, uint32_t per, uint32_t low, uint32_t high) { return at >= low && at + per <= high; }

template <class T> CK_DEVICE uint32_t slot(uint32_t row, uint32_t column) {
    return row * Shape<T>::PITCH + row / Shape<T>::PER * 16 + column * Shape<T>::ITEM;
}

// The vectors of a tile that are a thread's, on their way from global memory: asked for while the tile before is written.
template <class T> struct Ahead {
    static constexpr int LOADS = int(Shape<T>::VECTORS / THREADS);
    ck_v16 v[LOADS];
};

template <class T> CK_DEVICE void ask(const Tile& t, Ahead<T>& ahead, uint32_t tid, uint32_t nt) {
    using S = Shape<T>;
    if (!t.wide_source || nt != THREADS) return;
    CK_UNROLL
    for (int u = 0; u < Ahead<T>::LOADS; ++u) {
        const uint32_t id = tid + u * THREADS, row = id / S::ACROSS, column = id % S::ACROSS * S::PER;
        if (row >= t.row_low && row < t.row_high && within(column, S::PER, t.column_low, t.column_high))
            ahead.v[u] = ck_load<ck_v16>(t.src + int64_t(row) * t.by_row + column * S::ITEM);
    }
}

template <class T> CK_DEVICE void read_tile(const Tile& t, const Ahead<T>& ahead, char* shared, uint32_t tid, uint32_t nt) {
    using S = Shape<T>;
    if (t.wide_source && nt == THREADS) { // they were asked for; what is none of the box's is put too, and never read
        CK_UNROLL
        for (int u = 0; u < Ahead<T>::LOADS; ++u) {
            const uint32_t id = tid + u * THREADS, row = id / S::ACROSS, column = id % S::ACROSS * S::PER;
            if (within(column, S::PER, t.column_low, t.column_high)) *(ck_v16*)(shared + slot<T>(row, column)) = ahead.v[u];
        }
    } else if (t.wide_source) {
        for (uint32_t id = tid; id < S::VECTORS; id += nt) {
            const uint32_t row = id / S::ACROSS, column = id % S::ACROSS * S::PER;
            if (row >= t.row_low && row < t.row_high && within(column, S::PER, t.column_low, t.column_high))
                *(ck_v16*)(shared + slot<T>(row, column)) =
                    ck_load<ck_v16>(t.src + int64_t(row) * t.by_row + column * S::ITEM);
        }
    }
    if (t.wide_source && within(0, S::EDGE, t.column_low, t.column_high)) return;
    for (uint32_t k = tid; k < S::EDGE * S::EDGE; k += SINGLES * nt) {
        T items[SINGLES] = {};
        bool wanted[SINGLES] = {};
        CK_UNROLL
        for (int u = 0; u < SINGLES; ++u) {
            const uint32_t id = k + u * nt, row = id / S::EDGE, column = id % S::EDGE;
            wanted[u] = row >= t.row_low && row < t.row_high && column >= t.column_low && column < t.column_high &&
                        !(t.wide_source && within(column / S::PER * S::PER, S::PER, t.column_low, t.column_high));
            if (wanted[u]) items[u] = ck_load<T>(t.src + int64_t(row) * t.by_row + column * S::ITEM);
        }
        CK_UNROLL
        for (int u = 0; u < SINGLES; ++u)
            if (wanted[u]) *(T*)(shared + slot<T>((k + u * nt) / S::EDGE, (k + u * nt) % S::EDGE)) = items[u];
    }
}

template <class T> CK_DEVICE void write_tile(const Tile& t, const char* shared, uint32_t tid) {
    using S = Shape<T>;
    if (t.wide_target)
        for (uint32_t id = tid; id < S::VECTORS; id += ck_nt()) { // 8 vectors of a column, then of the next
            const uint32_t row = (id % 8 + id / (8 * S::EDGE) * 8) * S::PER, column = id / 8 % S::EDGE;
            if (column < t.column_low || column >= t.column_high || !within(row, S::PER, t.row_low, t.row_high)) continue;
            alignas(16) T items[S::PER];
            CK_UNROLL
            for (uint32_t e = 0; e < S::PER; ++e) items[e] = *(const T*)(shared + slot<T>(row, column) + e * S::PITCH);
            ck_v16 v;
            memcpy(&v, items, 16);
            ck_store<ck_v16>(t.dst + int64_t(column) * t.by_column + row * S::ITEM, v);
        }
    if (t.wide_target && within(0, S::EDGE, t.row_low, t.row_high)) return;
    for (uint32_t id = tid; id < S::EDGE * S::EDGE; id += ck_nt()) {
        const uint32_t column = id / S::EDGE, row = id % S::EDGE;
        if (row < t.row_low || row >= t.row_high || column < t.column_low || column >= t.column_high) continue;
        if (t.wide_target && within(row / S::PER * S::PER, S::PER, t.row_low, t.row_high)) continue;
        ck_store<T>(t.dst + int64_t(column) * t.by_column + row * S::ITEM, *(const T*)(shared + slot<T>(row, column)));
    }
}

// The part of a tile that begins at item `at` (counted from `skew` items before the box) that lies in the box's `extent`.
template <class T> CK_DEVICE void clip(uint32_t at, uint32_t skew, uint32_t extent, uint32_t& low, uint32_t& high) {
    low = at < skew ? skew - at : 0;
    const uint32_t left = extent + skew - at;
    high = left < Shape<T>::EDGE ? left : Shape<T>::EDGE;
}

template <class T> CK_DEVICE Tile tile_of(const ck_desc& d, uint32_t number) {
    const uint32_t upper = ck_div(number, d.div2), across = number - upper * d.tiles_per_row;
    const uint32_t batch = ck_div(upper, d.div1), down = upper - batch * d.rows_per_tile;
    const uint32_t column_skew = d.aux & 0xffff, row_skew = d.aux >> 16;
    const uint32_t row = down * Shape<T>::EDGE, column = across * Shape<T>::EDGE;
    const int64_t first_row = int64_t(row) - row_skew, first_column = int64_t(column) - column_skew;
    Tile t;
    clip<T>(row, row_skew, d.ext[1], t.row_low, t.row_high);
    clip<T>(column, column_skew, d.ext[2], t.column_low, t.column_high);
    t.by_row = d.sstr[1];
    t.by_column = d.dstr[2];
    t.src = d.src + int64_t(batch) * d.sstr[0] + first_row * t.by_row + first_column * int64_t(sizeof(T));
    t.dst = d.dst + int64_t(batch) * d.dstr[0] + first_row * int64_t(sizeof(T)) + first_column * t.by_column;
    t.wide_source = d.vlog == 4;
    t.wide_target = d.flags == 4;
    return t;
}

// Tiles [from, to) of a box. The vectors of the next one are on their way while one is written. turn: which buffer is free.
template <class T> CK_DEVICE uint32_t transpose_tiles(const ck_desc& d, uint32_t from, uint32_t to, ck_v16* buffers, uint32_t turn) {
    const uint32_t nt = ck_nt();
    Ahead<T> ahead = {};
    Tile next = tile_of<T>(d, from);
    ask<T>(next, ahead, ck_tid(), nt);
    for (; from < to; ++from, turn ^= BUFFER) {
        char* shared = (char*)(buffers + turn);
        const uint32_t tid = ck_fresh(ck_tid());
        const Tile t = CK_ROOMY ? next : tile_of<T>(d, ck_fresh(from)); // else found anew: two do not fit the registers
        read_tile<T>(t, ahead, shared, tid, nt);
        ck_sync();
        if (from + 1 < to) {
            next = tile_of<T>(d, from + 1);
            ask<T>(next, ahead, tid, nt);
        }
        write_tile<T>(t, shared, tid);
    }
    return turn;
}

CK_KERNEL(THREADS, 4)
void box_transpose(const ck_desc* list, uint32_t count, uint64_t tiles, uint64_t each, uint32_t more) {
    CK_SHARED(ck_v16, buffers, 2 * BUFFER);
    uint64_t tile = each * ck_bid() + (ck_bid() < more ? ck_bid() : more);
    const uint64_t end = tile + each + (ck_bid() < more);
    uint32_t number = ck_find(list, count, tile), turn = 0;
    while (tile < end) {
        const ck_desc& d = list[number++];
        const uint64_t start = d.tile0, next = number < count ? list[number].tile0 : tiles, stop = next < end ? next : end;
        const uint32_t from = uint32_t(tile - start), to = uint32_t(stop - start);
        switch (d.op) {
        case 0: turn = transpose_tiles<uint8_t>(d, from, to, buffers, turn); break;
        case 1: turn = transpose_tiles<uint16_t>(d, from, to, buffers, turn); break;
        case 2: turn = transpose_tiles<uint32_t>(d, from, to, buffers, turn); break;
        case 3: turn = transpose_tiles<uint64_t>(d, from, to, buffers, turn); break;
        default: turn = transpose_tiles<ck_v16>(d, from, to, buffers, turn);
        }
        tile = stop;
    }
}

} // namespace

CK_API int ck_box_transpose(const ck_desc* list, uint32_t count, uint64_t tiles, int blocks, int threads, void* stream) {
    if (tiles == 0) return cudaSuccess;
    if (count == 0 || threads < 0 || threads % 32 || threads > THREADS) return cudaErrorInvalidValue;
    blocks = ck_fill_grid(blocks, 64, tiles);
    if (blocks == 0) return ck_last_error();
    return CK_LAUNCH_SYNC(box_transpose, blocks, threads ? threads : THREADS, stream, list, count, tiles,
                          tiles / uint64_t(blocks), uint32_t(tiles % uint64_t(blocks)));
}
