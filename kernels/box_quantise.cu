// box_quantise: floats as codes and the scales of their blocks, to nearest: what `--quantize` makes, and its bits.
//
//     scale[b] = narrow(max(abs(in[block b])) / R)           numpy: quantised/nearest_codes.py: largest, scales_of
//     code[k] = nearest(in[k] / scale[b])                    numpy: codes_of, packed; each operation one rounding in fp32
//
// Schemes are those of weight_schemes/written_schemes.py: blocks of 128 x 128 (fp8-block), whole rows (fp8-channel, int8), groups of 128, 32 or 16
// of a row (int4-g128, mxfp8, mxfp4, nvfp4). Level 2 of a box is its rows, level 1 its matrices; boxes begin where blocks do. A list
// has one scheme and one type of floats. Codes of four bits are two a byte, the low half first. Blocks with what is no finite number
// are counted in counts[aux]: the CPU refuses them, and what is written there says nothing.
//
// A quotient of fp32 costs ten times a product, and a block has one divisor. So it is a product with its rounded reciprocal and two
// steps of Newton's with fused multiply-adds, which leave the rounded quotient (P. Markstein, "Computation of elementary functions on
// the IBM RISC System/6000 processor", 1990) while nothing on the way leaves the normal range: divisors from 2^-90 to 2^100; a
// remainder that is lost below 2^-149 belongs to a quotient below half of the least code. By powers of two the product is the
// quotient. Other blocks divide. "Quick" below is the first way.
//
// Map, groups: a tile is 8192 elements of a long row (divr: ck_magic of the tiles of a row), or as many whole rows as make that (divr: of
// the chunks of a row); a thread takes a chunk, 16 bytes of floats, the threads of a group find its largest by shuffles.
// Map, rows and squares: a tile is a block of values (divr: ck_magic of the blocks side by side); the threads of a block hold its chunks
// in registers between the two looks at them, as far as there are registers: 16,384 elements. So floats are read once.
// Where a side is not on the grid of chunks, or a row does not end on it (vlog 0), it goes element by element, twice.
// Bound: memory, the bytes of floats, codes and scales; GB/s by card in kernels/README.md.
#include "floats.h"

namespace {

constexpr uint32_t TILE = 8192;  // elements; `quantising.py` cuts by the same number
constexpr uint32_t SQUARE = 128; // rows and columns of a block
constexpr int THREADS = 256;
constexpr uint32_t WARPS = THREADS / 32;

// -- codes: R: the largest magnitude is so many scales; EXPONENT: of the largest code that is a power of two ------------------
// code: of any quotient. SIGNED: a zero keeps its sign. FITS: quick codes are right of quotients up to this.
struct To_e4m3 {
    static constexpr uint32_t BITS = 8, EXPONENT = 8;
    static constexpr float R = 448, FITS = 460;
    static constexpr bool SIGNED = true;
    CK_MEMBER static uint32_t code(float q) {
        uint32_t lost = 0;
        return ck_e4m3().narrow(ck_bits(q), lost);
    }
};
struct To_f4 {
    static constexpr uint32_t BITS = 4, EXPONENT = 2;
    static constexpr float R = 6, FITS = 0x1p100f;
    static constexpr bool SIGNED = false;
    CK_MEMBER static uint32_t code(float q) {
        const uint32_t bits = ck_bits(q + 0.0f), abs = bits & ~CK_SIGN, top = ck_f4::TOP; // -0 is 0
        return ck_narrow<1, 1>(abs < top ? abs : top) | (bits >> 28 & 8);
    }
};
template <uint32_t N> struct To_int { // in two's complement, or from 0 on where two share a byte
    static constexpr uint32_t BITS = N;
    static constexpr float HALF = float(1 << (N - 1)), R = HALF - 0.5f, FITS = 0x1p100f;
    static constexpr bool SIGNED = false;
    CK_MEMBER static uint32_t code(float q) {
        q = q < -HALF ? -HALF : q > HALF - 1 ? HALF - 1 : q;
        return (ck_bits(q + 0x1.8p23f) + (N == 4 ? 8 : 0)) & ((1u << N) - 1); // the sum's last place is 1
    }
};

// -- scales -----------------------------------------------------------------------------------------------------------------
struct Made { // a scale. stored: its bits. exact: is a product with `inverse` the quotient, else `quick`: may it be corrected
    float divisor, inverse;
    uint32_t stored;
    bool quick;
};

struct Powers { // E8M0
    static constexpr bool EXACT = true;
    CK_MEMBER static uint32_t item(const ck_quantised&) { return 1; }
    template <class C> CK_MEMBER static Made made(uint32_t size, const ck_quantised&) {
        uint32_t e = (size + (1u << 21)) >> 23, lost = 0; // from 1.75 on the next power
        e = e < 254 ? e : 254;
        const uint32_t code = e > C::EXPONENT ? e - C::EXPONENT : 0;
        const float inverse = ck_float((254 - code) << 23);
        return {ck_float(ck_e8m0().wide(uint8_t(code), lost)), inverse, code, size < CK_INF && ck_float(size) * inverse <= C::FITS};
    }
};

template <class C> CK_DEVICE Made divided(float divisor, uint32_t stored, uint32_t size, float most) {
    const float inverse = 1.0f / divisor;
    return {divisor, inverse, stored,
            size < CK_INF && divisor >= 0x1p-90f && divisor <= most && ck_float(size) * inverse <= C::FITS};
}

// Floats. LEAST: 2^LEAST[0], ... stand for a scale that is zero: the epsilons of F32, BF16, F16, or 1.
template <bool ONE> struct Plain {
    static constexpr bool EXACT = false;
    CK_MEMBER static uint32_t item(const ck_quantised& of) { return of.kind == CK_F32 ? 4 : 2; }
    template <class C> CK_MEMBER static Made made(uint32_t size, const ck_quantised& of) {
        const uint32_t wide = ck_bits(ck_float(size) / C::R);
        uint32_t stored = wide, least = ONE ? 0 : 23, lost = 0;
        if (of.kind == CK_BF16) stored = ck_bf16().narrow(wide, lost), least = ONE ? 0 : 7;
        if (of.kind == CK_F16) stored = ck_f16().narrow(wide, lost), least = ONE ? 0 : 10;
        if (stored == 0) { // 2^-least
            const uint32_t bits = (127 - least) << 23;
            stored = of.kind == CK_F32 ? bits : of.kind == CK_BF16 ? bits >> 16 : (15 - least) << 10;
        }
        const uint32_t bits = of.kind == CK_F32 ? stored : of.kind == CK_BF16 ? stored << 16 : ck_f16().wide(uint16_t(stored), lost);
        return divided<C>(ck_float(bits), stored, size, 0x1p100f);
    }
};

// E4M3 in units of one fp32 of the whole tensor. Above 1 a quotient may become zero that is none: a sign is kept or not by that.
struct Shared {
    static constexpr bool EXACT = false;
    CK_MEMBER static uint32_t item(const ck_quantised&) { return 1; }
    template <class C> CK_MEMBER static Made made(uint32_t size, const ck_quantised& of) {
        uint32_t lost = 0;
        uint32_t stored = ck_e4m3().narrow(ck_bits(of.whole * (ck_float(size) / C::R)), lost);
        stored = stored ? stored : 0x20; // 0.125
        return divided<C>(ck_float(ck_e4m3().wide(uint8_t(stored), lost)) / of.whole, stored, size, 1);
    }
};

// -- the work -----------------------------------------------------------------------------------------------------------------
// F: floats. C: codes. S: scales. HIGH rows of WIDE elements share one, 0 for whole rows.
template <class F, class C, class S, uint32_t HIGH_, uint32_t WIDE_> struct Job {
    using Bits = typename F::Bits;
    static constexpr uint32_t STEP = sizeof(Bits), N = 16 / STEP, OUT = N * C::BITS / 8; // bytes of an element, elements and codes of a chunk
    static constexpr uint32_t HIGH = HIGH_, WIDE = WIDE_;
    static constexpr bool GROUPS = HIGH == 1 && WIDE;
    static constexpr uint32_t HELD = GROUPS ? 4 : 16384 / N / THREADS; // chunks that a thread has in registers
    static constexpr int BLOCKS = GROUPS ? 3 : STEP == 2 ? 4 : 2;         // of threads, at once on a multiprocessor
    using Raw = ck_group<Bits, N>;
    using Codes = C;
    using Scales = S;
    F type;
    const ck_quantised* table;

    CK_MEMBER static Raw load(uint64_t from) { return ck_load<Raw>(from); }
    CK_MEMBER uint32_t size(const Raw& raw) const {
        uint32_t bits[N], most = 0;
        type.template quick_wide<N>(raw, bits);
        CK_UNROLL
        for (uint32_t k = 0; k < N; ++k) most = most > (bits[k] & ~CK_SIGN) ? most : bits[k] & ~CK_SIGN;
        return type.template usual<N>(raw) ? most : CK_INF;
    }
    CK_MEMBER uint32_t size(uint64_t from, uint32_t count) const { // element by element
        uint32_t most = 0, lost = 0;
        CK_ROLLED
        for (uint32_t k = 0; k < count; ++k) {
            const uint32_t abs = type.wide(ck_load_anywhere<Bits>(from + k * STEP), lost) & ~CK_SIGN;
            most = most > abs ? most : abs;
        }
        return most;
    }
    CK_MEMBER void store(const Raw& raw, const Made& by, uint64_t to) const {
        uint32_t bits[N], words[OUT < 4 ? 1 : OUT / 4] = {};
        type.template quick_wide<N>(raw, bits);
        CK_UNROLL
        for (uint32_t k = 0; k < N; ++k) {
            const float v = ck_float(bits[k]);
            float q = v * by.inverse;
            if constexpr (!S::EXACT) {
                q = ck_fma(ck_fma(-q, by.divisor, v), by.inverse, q);
                q = ck_fma(ck_fma(-q, by.divisor, v), by.inverse, q);
            }
            bits[k] = C::SIGNED && !S::EXACT ? ck_bits(q) | (bits[k] & CK_SIGN) : ck_bits(q); // the steps lose that of a zero
        }
        if constexpr (C::SIGNED) {
            CK_UNROLL
            for (uint32_t k = 0; k < N; k += 4)
                words[k / 4] = ck_pair_e4m3(bits[k], bits[k + 1]) | ck_pair_e4m3(bits[k + 2], bits[k + 3]) << 16;
        } else {
            CK_UNROLL
            for (uint32_t k = 0; k < N; ++k) words[k * C::BITS / 32] |= C::code(ck_float(bits[k])) << (k * C::BITS % 32);
        }
        ck_group<uint8_t, OUT> out;
        memcpy(&out, words, sizeof out);
        ck_store<ck_group<uint8_t, OUT>>(to, out);
    }
    CK_MEMBER void store(uint64_t from, uint32_t count, const Made& by, uint64_t to) const { // element by element
        constexpr uint32_t EACH = 8 / C::BITS;
        CK_ROLLED
        for (uint32_t k = 0; k < count; k += EACH) {
            uint32_t byte = 0, lost = 0;
            CK_ROLLED
            for (uint32_t e = 0; e < EACH; ++e) {
                const float v = ck_float(type.wide(ck_load_anywhere<Bits>(from + (k + e) * STEP), lost));
                byte |= C::code(v / by.divisor) << (e * C::BITS);
            }
            ck_store<uint8_t>(to + k / EACH, uint8_t(byte));
        }
    }

    CK_MEMBER static void store_scale(const ck_quantised& of, const Made& by, uint64_t to) {
        const uint32_t item = S::item(of);
        if (item == 4) return ck_store<uint32_t>(to, by.stored);
        if (item == 2) return ck_store<uint16_t>(to, uint16_t(by.stored));
        ck_store<uint8_t>(to, uint8_t(by.stored));
    }
};

// Rows of a tile, in groups. FLAT: there is one. All threads of a warp take part in its shuffles, those beyond the last chunk with
// nothing.
template <class J, bool FLAT> CK_DEVICE uint32_t groups(const J& job, const ck_desc& box, uint32_t first, uint32_t rows, uint64_t begin) {
    constexpr uint32_t N = J::N, DEPTH = FLAT ? J::HELD : 1, LANES = J::WIDE / N; // the strides of rows take the registers
    const ck_desc d = box; // in registers, as far as it is needed
    const ck_quantised of = job.table[d.aux];
    const bool fit = d.vlog;
    const uint32_t width = uint32_t(d.run - begin < TILE ? d.run - begin : TILE) / N, count = rows * width; // chunks
    const uint32_t item = J::Scales::item(of);
    struct Place {
        uint64_t from, to, scale;
    };
    const auto row_at = [&](uint32_t row) {
        const uint32_t matrix = ck_div(row, d.div2);
        return Place{d.src + uint64_t(ck_row(d, d.sstr, row)) + begin * J::STEP,
                     d.dst + uint64_t(ck_row(d, d.dstr, row)) + begin * J::Codes::BITS / 8,
                     of.scales + uint64_t(matrix * of.matrix_stride + (row - matrix * d.ext[2]) * of.row_stride) + begin / J::WIDE * item};
    };
    const Place flat = row_at(first);
    const auto place = [&](uint32_t k) {
        const uint32_t down = FLAT ? 0 : ck_div(k, d.divr), across = FLAT ? k : k - down * width;
        const Place p = FLAT ? flat : row_at(first + down);
        return Place{p.from + across * 16, p.to + across * J::OUT, p.scale + across / LANES * item};
    };
    uint32_t bad = 0;
    for (uint32_t base = 0; base < count; base += DEPTH * ck_nt()) {
        typename J::Raw raw[DEPTH] = {};
        const uint32_t begun = base + ck_tid();
        if (fit) {
            CK_UNROLL
            for (uint32_t u = 0; u < DEPTH; ++u) // the last one again where there are fewer: cheaper than asking
                raw[u] = J::load(place(begun + u * ck_nt() < count ? begun + u * ck_nt() : count - 1).from);
        }
        CK_UNROLL
        for (uint32_t u = 0; u < DEPTH; ++u) {
            const uint32_t k = begun + u * ck_nt();
            const bool mine = k < count;
            const Place p = place(mine ? k : count - 1);
            uint32_t size = fit ? job.size(raw[u]) : mine ? job.size(p.from, N) : 0;
            CK_UNROLL
            for (uint32_t mask = 1; mask < LANES; mask *= 2) {
                const uint32_t other = ck_shfl_xor(size, mask);
                size = size > other ? size : other;
            }
            if (!mine) continue;
            const Made by = J::Scales::template made<typename J::Codes>(size, of);
            if (k % LANES == 0) {
                bad += size >= CK_INF;
                J::store_scale(of, by, p.scale);
            }
            if (fit && by.quick)
                job.store(raw[u], by, p.to);
            else
                job.store(p.from, N, by, p.to);
        }
    }
    return bad;
}

template <class J> CK_DEVICE uint32_t group_tile(const J& job, const ck_desc& d, uint32_t tile) {
    if (d.tiles_per_row > 1) {
        const uint32_t row = ck_div(tile, d.divr);
        return groups<J, true>(job, d, row, 1, uint64_t(tile - row * d.tiles_per_row) * TILE);
    }
    const uint32_t first = tile * d.rows_per_tile, rest = d.rows - first, rows = rest < d.rows_per_tile ? rest : d.rows_per_tile;
    return rows == 1 ? groups<J, true>(job, d, first, 1, 0) : groups<J, false>(job, d, first, rows, 0);
}

// A block of values: the threads' chunks, then the largest of all by way of shared memory, then the chunks again.
template <class J> CK_DEVICE uint32_t block_tile(const J& job, const ck_desc& box, uint32_t tile, uint32_t* largest) {
    constexpr uint32_t N = J::N, HELD = J::HELD, ACROSS = SQUARE / N; // chunks of a row of a square
    constexpr bool SQUARES = J::HIGH == SQUARE;                              // else rows
    const ck_desc& d = box;
    const ck_quantised of = job.table[d.aux];
    const bool fit = d.vlog;
    const uint32_t beside = SQUARES ? uint32_t((d.run + SQUARE - 1) / SQUARE) : 1;
    const uint32_t down = ck_div(tile, d.divr), across = tile - down * beside;
    const uint32_t matrix = ck_div(down, of.div_down), block = down - matrix * of.down, row = block * (SQUARES ? SQUARE : 1);
    const uint64_t column = uint64_t(across) * SQUARE;
    const uint32_t rest = d.ext[2] - row, height = SQUARES ? rest < SQUARE ? rest : SQUARE : 1;
    const uint32_t width = uint32_t(!SQUARES || d.run - column < SQUARE ? d.run - column : SQUARE);
    const int64_t source_row = d.sstr[2], target_row = d.dstr[2];
    const uint64_t from = d.src + uint64_t(matrix * d.sstr[1] + row * source_row) + column * J::STEP;
    const uint64_t to = d.dst + uint64_t(matrix * d.dstr[1] + row * target_row) + column;
    const uint32_t count = SQUARES ? height * ACROSS : (width + N - 1) / N, held = HELD * ck_nt();
    const auto x = [&](uint32_t k) { return (SQUARES ? k % ACROSS : k) * N; };
    const auto y = [&](uint32_t k) { return SQUARES ? k / ACROSS : 0; };
    const auto source = [&](uint32_t k) { return from + uint64_t(y(k) * source_row) + uint64_t(x(k)) * J::STEP; };
    const auto target = [&](uint32_t k) { return to + uint64_t(y(k) * target_row) + x(k); };
    const auto inside = [&](uint32_t k) { return k < count && x(k) < width; };
    const auto of_chunk = [&](uint32_t k) { return width - x(k) < N ? width - x(k) : N; }; // elements

    typename J::Raw raw[HELD] = {};
    uint32_t size = 0;
    if (fit) {
        CK_UNROLL
        for (uint32_t i = 0; i < HELD; ++i)
            if (const uint32_t k = ck_tid() + i * ck_nt(); inside(k)) raw[i] = J::load(source(k));
        CK_UNROLL
        for (uint32_t i = 0; i < HELD; ++i) {
            const uint32_t one = job.size(raw[i]);
            size = size > one ? size : one;
        }
    }
    CK_ROLLED
    for (uint32_t k = ck_tid() + (fit ? held : 0); k < count; k += ck_nt()) {
        if (!inside(k)) continue;
        const uint32_t one = fit ? job.size(J::load(source(k))) : job.size(source(k), of_chunk(k));
        size = size > one ? size : one;
    }
    for (uint32_t mask = 1; mask < 32; mask *= 2) {
        const uint32_t other = ck_shfl_xor(size, mask);
        size = size > other ? size : other;
    }
    if (ck_tid() % 32 == 0) largest[ck_tid() / 32] = size;
    ck_sync();
    for (uint32_t w = 0; w < ck_nt() / 32; ++w) size = size > largest[w] ? size : largest[w];

    const Made by = J::Scales::template made<typename J::Codes>(size, of);
    const bool quick = fit && by.quick;
    if (ck_tid() == 0)
        J::store_scale(of, by, of.scales + uint64_t(matrix * of.matrix_stride + block * of.row_stride) + uint64_t(across) * J::Scales::item(of));
    if (quick) {
        CK_UNROLL
        for (uint32_t i = 0; i < HELD; ++i)
            if (const uint32_t k = ck_tid() + i * ck_nt(); inside(k)) job.store(raw[i], by, target(k));
    }
    CK_ROLLED
    for (uint32_t k = ck_tid() + (quick ? held : 0); k < count; k += ck_nt()) {
        if (!inside(k)) continue;
        if (quick)
            job.store(J::load(source(k)), by, target(k));
        else
            job.store(source(k), of_chunk(k), by, target(k));
    }
    return ck_tid() == 0 && size >= CK_INF;
}

template <class J>
CK_KERNEL(THREADS, J::BLOCKS) void box_quantise(J job, const ck_desc* list, uint32_t count, uint64_t tiles, uint64_t* counts) {
    CK_SHARED(uint32_t, largest, 2 * WARPS); // of two tiles in turn: one barrier keeps threads of the next from the last
    uint64_t tile = tiles * ck_bid() / ck_nb();
    const uint64_t end = tiles * (ck_bid() + 1) / ck_nb();
    if (tile >= end) return;
    for (uint32_t number = ck_find(list, count, tile);; ++number) {
        const ck_desc& d = list[number];
        const uint64_t next = number + 1 < count ? list[number + 1].tile0 : tiles, stop = next < end ? next : end;
        uint32_t bad = 0;
        for (; tile < stop; ++tile) {
            if constexpr (J::GROUPS)
                bad += group_tile(job, d, uint32_t(tile - d.tile0));
            else
                bad += block_tile(job, d, uint32_t(tile - d.tile0), largest + tile % 2 * WARPS);
        }
        if (bad) ck_atomic_add(counts + d.aux, uint64_t(bad));
        if (tile >= end) return;
    }
}

struct Call {
    const ck_desc* list;
    uint32_t count;
    uint64_t tiles;
    const ck_quantised* table;
    uint64_t* counts;
    int blocks, threads;
    void* stream;
};

template <class F, class C, class S, uint32_t HIGH, uint32_t WIDE> int launch(const Call& c) {
    using J = Job<F, C, S, HIGH, WIDE>;
    const int blocks = ck_fill_grid(c.blocks, ck_long(c.tiles, c.count) ? CK_EVERY : 12, c.tiles);
    if (blocks == 0) return ck_last_error();
    return CK_LAUNCH_SYNC(box_quantise<J>, blocks, c.threads, c.stream, J{F{}, c.table}, c.list, c.count, c.tiles, c.counts);
}

template <class F> int quantised(const Call& c, uint32_t scheme) {
    switch (scheme) {
    case CK_FP8_BLOCK: return launch<F, To_e4m3, Plain<true>, SQUARE, SQUARE>(c);
    case CK_FP8_CHANNEL: return launch<F, To_e4m3, Plain<false>, 1, 0>(c);
    case CK_INT8: return launch<F, To_int<8>, Plain<false>, 1, 0>(c);
    case CK_INT4_G128: return launch<F, To_int<4>, Plain<false>, 1, 128>(c);
    case CK_MXFP8: return launch<F, To_e4m3, Powers, 1, 32>(c);
    case CK_MXFP4: return launch<F, To_f4, Powers, 1, 32>(c);
    default: return launch<F, To_f4, Shared, 1, 16>(c);
    }
}

} // namespace

CK_API int ck_box_quantise(const ck_desc* list, uint32_t count, uint64_t tiles, uint32_t source, uint32_t scheme,
                           const ck_quantised* table, uint64_t* counts, int blocks, int threads, void* stream) {
    if ((source != CK_F32 && source != CK_BF16 && source != CK_F16) || scheme > CK_NVFP4) return cudaErrorInvalidValue;
    if (tiles == 0) return cudaSuccess;
    if (count == 0 || threads < 0 || threads % 32 || threads > THREADS) return cudaErrorInvalidValue;
    const Call c{list, count, tiles, table, counts, blocks, threads ? threads : THREADS, stream};
    if (source == CK_F32) return quantised<ck_f32>(c, scheme);
    if (source == CK_BF16) return quantised<ck_bf16>(c, scheme);
    return quantised<ck_f16>(c, scheme);
}
