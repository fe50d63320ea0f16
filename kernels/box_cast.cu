// box_cast: strided boxes of one float type as another; box_dequantise: of codes and their scales as floats.
//
//     out[k] = narrow(wide(in[k]))                                  numpy: x.astype(target), as run/compute.py does it
//     out[r, c] = narrow(code[r, c] * scale[r / height, c / width])  numpy: run/dequantize: one product in fp32, one rounding
//
// Types and their rounding: floats.h. A list has one pair of types; `run`, tiles and `divr` count elements. What a finite value
// lost is counted in counts[2 * aux]; elements whose scale is NaN in counts[2 * aux + 1].
// F4 is two codes a byte, the low half first: its addresses and strides (src, sstr) count half bytes, so a row may begin in
// the middle of one. Level 2 of a quantised box is its rows, level 1 its matrices; a scale is found by the GLOBAL row and
// column, so a shard that begins inside a block has the right one.
//
// Map: a tile is 8192 elements of a long row (divr: ck_magic of the tiles of a row), or as many whole rows as make that (divr:
// of what a row is shared out by, groups if vlog is not 0); block b of G takes tiles [b*T/G, (b+1)*T/G).
// A thread takes a group of elements whose wider side is 16 bytes (fp32 -> bf16: load 16, store 8; E4M3 -> bf16: load 8,
// store 16), so that a warp's loads and stores both run on without a gap. Any run and any alignment: where the two sides are not
// on the grid of groups together it goes element by element, and byte by byte off the grid of elements.
// Boxes may not overlap where one is written. Nothing is read or written outside them.
// Bound: memory, the bytes of both sides an element; GB/s by card in kernels/README.md.
#include "floats.h"

namespace {

constexpr uint32_t TILE = 8192; // elements; `casts.py` cuts by the same number
constexpr int THREADS = 256;
constexpr uint32_t WARP_ROW = 256; // elements: rows from here on are the work of warps,
constexpr uint32_t WARP_SPAN = 1024; // which take so many at a time: 8 of them share two rows of 4096

// -- sources: STEP is what an element adds to an address; loads of a group want it on its grid ----------------------------
template <class F> struct Whole {
    using Type = F;
    using Bits = typename F::Bits;
    static constexpr uint32_t STEP = sizeof(Bits);
    template <uint32_t N> using Raw = ck_group<Bits, N>;
    F type;
    template <bool FIT> CK_MEMBER Bits one(uint64_t at) const { return FIT ? ck_load<Bits>(at) : ck_load_anywhere<Bits>(at); }
    template <uint32_t N> CK_MEMBER Raw<N> load(uint64_t at) const { return ck_load<Raw<N>>(at); }
    template <uint32_t N> CK_MEMBER bool usual(const Raw<N>& raw) const { return type.template usual<N>(raw); }
};

struct Halves {
    using Type = ck_f4;
    using Bits = uint8_t;
    static constexpr uint32_t STEP = 1; // half a byte
    template <uint32_t N> using Raw = ck_group<uint8_t, N / 2>;
    ck_f4 type;
    template <bool FIT> CK_MEMBER uint8_t one(uint64_t at) const { return uint8_t(ck_load<uint8_t>(at / 2) >> (at % 2 * 4) & 15); }
    template <uint32_t N> CK_MEMBER Raw<N> load(uint64_t at) const { return ck_load<Raw<N>>(at / 2); }
    template <uint32_t N> CK_MEMBER bool usual(const Raw<N>&) const { return true; }
};

// -- scales: `Of` those of a box, `At` those of a row of it ---------------------------------------------------------------
struct Unscaled {
    struct Of {};
    struct At {};
    static constexpr bool SCALED = false;
    CK_MEMBER Of of(const ck_desc&) const { return {}; }
    CK_MEMBER At at(const ck_desc&, const Of&, uint32_t) const { return {}; }
    CK_MEMBER float scale(const Of&, const At&, uint32_t) const { return 1; }
    CK_MEMBER bool grouped(const Of&, uint32_t, uint32_t) const { return true; }
};

struct Scaled {
    using Of = ck_scales;
    struct At {
        uint64_t row;
        uint32_t shift; // log2 of a block's width where that is a power of two, else 32
    };
    static constexpr bool SCALED = true;
    const ck_scales* table;
    CK_MEMBER Of of(const ck_desc& d) const { return table[d.aux]; }
    CK_MEMBER At at(const ck_desc& d, const Of& s, uint32_t row) const {
        const uint32_t upper = ck_div(row, d.div2), matrix = upper - ck_div(upper, d.div1) * d.ext[1];
        const uint32_t block = ck_div(s.row0 + (row - upper * d.ext[2]), s.div_height);
        return {s.address + uint64_t(matrix * s.matrix_stride + block * s.row_stride),
                ck_ones(s.width) == 1 ? ck_ones(s.width - 1) : 32};
    }
    CK_MEMBER float scale(const Of& s, const At& at, uint32_t column) const {
        const uint32_t block = at.shift < 32 ? (s.column0 + column) >> at.shift : ck_div(s.column0 + column, s.div_width);
        uint32_t bits = 0, lost = 0; // three loads of which one is done: cheaper than three ways
        if (s.kind == CK_F32) bits = ck_load_near<uint32_t>(at.row + uint64_t(block) * 4);
        if (s.kind == CK_BF16) bits = uint32_t(ck_load_near<uint16_t>(at.row + uint64_t(block) * 2)) << 16;
        if (s.kind == CK_E8M0) bits = ck_load_near<uint8_t>(at.row + block);
        return ck_float(s.kind == CK_E8M0 ? ck_e8m0().wide(uint8_t(bits), lost) : bits);
    }
    // do groups of `n` that begin at `column` and every n further lie in one block each?
    CK_MEMBER bool grouped(const Of& s, uint32_t column, uint32_t n) const {
        return s.width % n == 0 && (s.column0 + column) % n == 0;
    }
};

CK_DEVICE bool is_nan(float f) { return (ck_bits(f) & ~CK_SIGN) > CK_INF; }

// The product as x86 makes it: the code's NaN, else the scale's, made quiet; 0 times infinity is the negative NaN.
CK_DEVICE uint32_t product(uint32_t code, float scale) {
    if ((code & ~CK_SIGN) > CK_INF) return code | 0x400000;
    const float made = ck_float(code) * scale;
    return !is_nan(made) ? ck_bits(made) : is_nan(scale) ? ck_bits(scale) | 0x400000 : CK_SIGN | CK_NAN;
}

// -- the work -----------------------------------------------------------------------------------------------------------
struct Tally {
    uint32_t lost = 0, nans = 0;
};

template <class At> struct Place { // a group, or an element: where it comes from and goes to, the scales of its row, its column
    uint64_t from, to;
    At at;
    uint32_t column;
};

template <class S, class D, class Q> struct Job {
    using Out = typename D::Bits;
    using Of = typename Q::Of;
    using At = typename Q::At;
    static constexpr bool HASTY = S::Type::HASTY && D::HASTY, SCALED = Q::SCALED;
    static constexpr uint32_t STEP = S::STEP, OUT = sizeof(Out), WIDER = S::STEP > OUT ? S::STEP : OUT, GROUP = 16 / WIDER;
    using Code = typename S::Bits;
    using Raw = typename S::template Raw<GROUP>;
    S source;
    D target;
    Q scales;

    // FIT: the target lies on its own grid.
    template <bool FIT> CK_MEMBER void element(typename S::Bits code, float scale, uint64_t to, Tally& tally) const {
        uint32_t bits = source.type.wide(code, tally.lost);
        if constexpr (Q::SCALED) {
            bits = product(bits, scale);
            tally.nans += is_nan(scale);
        }
        const Out out = target.narrow(bits, tally.lost);
        if constexpr (FIT)
            ck_store<Out>(to, out);
        else
            ck_store_anywhere<Out>(to, out);
    }

    // Stores a group without anything special in it; false where there is.
    CK_MEMBER bool quick(const Raw& raw, float scale, uint64_t to) const {
        using Type = typename S::Type;
        // of a scale below this, |code| <= TOP makes values below LIMIT
        constexpr uint32_t most = ((D::LIMIT >> 23) - (Type::TOP >> 23) + 126) << 23;
        if (!source.template usual<GROUP>(raw) || (Q::SCALED && (ck_bits(scale) & ~CK_SIGN) >= most)) return false;
        uint32_t bits[GROUP], largest = 0;
        source.type.template quick_wide<GROUP>(raw, bits);
        CK_UNROLL
        for (uint32_t k = 0; k < GROUP; ++k) {
            if constexpr (Q::SCALED) bits[k] = ck_bits(ck_float(bits[k]) * scale);
            if constexpr (!Q::SCALED && !D::ANY && Type::TOP >= D::LIMIT)
                largest = largest > (bits[k] & ~CK_SIGN) ? largest : bits[k] & ~CK_SIGN;
        }
        if (largest >= D::LIMIT) return false;
        ck_group<Out, GROUP> out;
        if constexpr (OUT == 2) {
            uint32_t words[GROUP / 2];
            CK_UNROLL
            for (uint32_t k = 0; k < GROUP / 2; ++k) words[k] = target.quick_pair(bits[2 * k], bits[2 * k + 1]);
            memcpy(&out, words, sizeof out);
        } else if constexpr (OUT == 1) {
            uint32_t words[GROUP / 4];
            CK_UNROLL
            for (uint32_t k = 0; k < GROUP; k += 4)
                words[k / 4] = target.quick_pair(bits[k], bits[k + 1]) | target.quick_pair(bits[k + 2], bits[k + 3]) << 16;
            memcpy(&out, words, sizeof out);
        } else {
            memcpy(&out, bits, sizeof out);
        }
        ck_store<ck_group<Out, GROUP>>(to, out);
        return true;
    }
};

// `count` groups, DEPTH in flight; `place(k)` says where group k lies.
template <uint32_t DEPTH, class J, class P>
CK_DEVICE void cast_groups(const J& job, const typename J::Of& of, uint32_t count, uint32_t lane, uint32_t lanes, Tally& tally,
                           const P& place) {
    for (uint32_t k = lane; k < count; k += DEPTH * lanes) {
        typename J::Raw raw[DEPTH];
        float scale[DEPTH];
        uint32_t special = 0;
        CK_UNROLL
        for (uint32_t u = 0; u < DEPTH; ++u) { // the last one again where there are fewer: cheaper than asking
            const auto p = place(k + u * lanes < count ? k + u * lanes : count - 1);
            raw[u] = job.source.template load<J::GROUP>(p.from);
            scale[u] = job.scales.scale(of, p.at, p.column);
        }
        CK_UNROLL
        for (uint32_t u = 0; u < DEPTH; ++u)
            if (k + u * lanes < count && !job.quick(raw[u], scale[u], place(k + u * lanes).to)) special |= 1u << u;
        for (uint32_t e = 0; special >> e / J::GROUP; ++e) {
            if (!(special >> e / J::GROUP & 1)) continue;
            const auto p = place(k + e / J::GROUP * lanes);
            job.template element<true>(job.source.template one<true>(p.from + e % J::GROUP * J::STEP), job.scales.scale(of, p.at, p.column),
                                       p.to + e % J::GROUP * J::OUT, tally);
        }
    }
}

// `count` elements. FIT: both sides lie on the grid of their elements; then several are in flight.
template <bool FIT, class J, class P>
CK_DEVICE void cast_elements(const J& job, const typename J::Of& of, uint32_t count, uint32_t lane, uint32_t lanes, Tally& tally,
                             const P& place) {
    constexpr uint32_t DEPTH = !FIT || !J::HASTY ? 1 : J::SCALED ? 3 : 4; // as many as registers hold
    for (uint32_t k = lane; k < count; k += DEPTH * lanes) {
        typename J::Code code[DEPTH];
        float scale[DEPTH];
        CK_UNROLL
        for (uint32_t u = 0; u < DEPTH; ++u) {
            const auto p = place(k + u * lanes < count ? k + u * lanes : count - 1);
            code[u] = job.source.template one<FIT>(p.from);
            scale[u] = job.scales.scale(of, p.at, p.column);
        }
        CK_UNROLL
        for (uint32_t u = 0; u < DEPTH; ++u)
            if (k + u * lanes < count) job.template element<FIT>(code[u], scale[u], place(k + u * lanes).to, tally);
    }
}

template <class J, class P>
CK_DEVICE void cast_elements(bool fit, const J& job, const typename J::Of& of, uint32_t count, uint32_t lane, uint32_t lanes,
                             Tally& tally, const P& place) {
    if (fit)
        cast_elements<true>(job, of, count, lane, lanes, tally, place);
    else
        cast_elements<false>(job, of, count, lane, lanes, tally, place);
}

// `count` elements that run on without a gap on both sides, by a party of `lanes` threads of which this is number `lane`.
template <class J>
CK_DEVICE void cast_span(const J& job, const typename J::Of& of, const Place<typename J::At>& first, uint32_t count, uint32_t lane,
                         uint32_t lanes, Tally& tally) {
    constexpr uint32_t N = J::GROUP;
    const auto element = [&](uint32_t e) {
        return Place<typename J::At>{first.from + uint64_t(e) * J::STEP, first.to + uint64_t(e) * J::OUT, first.at, first.column + e};
    };
    uint32_t head = count, tail = count; // what goes element by element: before head, and from tail on
    if constexpr (J::HASTY) {
        // elements before the target is on its grid of groups; the source, and the scales, may be off theirs there
        const uint32_t before = uint32_t(0 - first.to) % (N * J::OUT) / J::OUT;
        if (before < count && first.to % J::OUT == 0 && (first.from + before * J::STEP) % (N * J::STEP) == 0 &&
            job.scales.grouped(of, first.column + before, N)) {
            const uint32_t groups = (count - before) / N;
            head = before;
            tail = before + groups * N;
            cast_groups<4>(job, of, groups, lane, lanes, tally, [&](uint32_t k) { return element(head + k * N); });
        }
    }
    const bool fit = first.from % J::STEP == 0 && first.to % J::OUT == 0;
    cast_elements(fit, job, of, head + count - tail, lane, lanes, tally, [&](uint32_t k) { return element(k < head ? k : k - head + tail); });
}

// Short rows, `rows` of them from number `first` on, in groups where the descriptor says that all are on the grid.
template <class J>
CK_DEVICE void cast_rows(const J& job, const ck_desc& box, uint32_t first, uint32_t rows, Tally& tally) {
    const ck_desc d = box; // in registers, as far as it is needed
    const typename J::Of of = job.scales.of(d);
    const bool grouped = J::HASTY && d.vlog;
    // divr divides by the groups of a row; types that are not HASTY go by element all the same
    const uint32_t n = grouped ? J::GROUP : 1, width = uint32_t(d.run) / n, shift = grouped ? 0 : d.vlog;
    const auto place = [&](uint32_t k) {
        const uint32_t row = ck_div(k >> shift, d.divr), column = (k - row * width) * n;
        return Place<typename J::At>{d.src + uint64_t(ck_row(d, d.sstr, first + row)) + uint64_t(column) * J::STEP,
                                     d.dst + uint64_t(ck_row(d, d.dstr, first + row)) + uint64_t(column) * J::OUT,
                                     job.scales.at(d, of, first + row), column};
    };
    if constexpr (J::HASTY) {
        if (grouped) return cast_groups<2>(job, of, rows * width, ck_tid(), ck_nt(), tally, place);
    }
    const uint64_t from = d.src | uint64_t(d.sstr[0] | d.sstr[1] | d.sstr[2]), to = d.dst | uint64_t(d.dstr[0] | d.dstr[1] | d.dstr[2]);
    cast_elements(from % J::STEP == 0 && to % J::OUT == 0, job, of, rows * width, ck_tid(), ck_nt(), tally, place);
}

template <class J>
CK_DEVICE void cast_tile(const J& job, const ck_desc& d, uint64_t tile, Tally& tally) {
    const bool cut = d.tiles_per_row > 1;
    const uint32_t first = cut ? ck_div(uint32_t(tile), d.divr) : uint32_t(tile) * d.rows_per_tile;
    const uint32_t rows = cut ? 1 : d.rows - first < d.rows_per_tile ? d.rows - first : d.rows_per_tile;
    if (!cut && d.run < WARP_ROW) return cast_rows(job, d, first, rows, tally);
    // a piece of a long row is the block's work; rows of a tile that has several are the work of its warps
    const uint32_t run = uint32_t(d.run), spans = cut ? 1 : (run + WARP_SPAN - 1) / WARP_SPAN;
    const uint32_t party = cut ? ck_nt() : 32, lane = cut ? ck_tid() : ck_tid() & 31;
    for (uint32_t k = cut ? 0 : ck_tid() >> 5; k < rows * spans; k += cut ? 1 : ck_nt() >> 5) {
        const typename J::Of of = job.scales.of(d);
        const uint32_t down = cut ? 0 : k / spans, number = k - down * spans, row = first + down;
        const uint64_t from = d.src + uint64_t(ck_row(d, d.sstr, row)), to = d.dst + uint64_t(ck_row(d, d.dstr, row));
        // warps' spans are cut on the target's grid of groups, so that only the ends of a row are odd
        const uint32_t skew = uint32_t(to) % (J::GROUP * J::OUT) / J::OUT;
        const uint64_t begin = cut ? (tile - uint64_t(first) * d.tiles_per_row) * TILE : number ? number * WARP_SPAN - skew : 0;
        const uint64_t end = cut ? (d.run - begin < TILE ? d.run : begin + TILE) : number + 1 < spans ? (number + 1) * WARP_SPAN - skew : run;
        const Place<typename J::At> place{from + begin * J::STEP, to + begin * J::OUT, job.scales.at(d, of, row), uint32_t(begin)};
        cast_span(job, of, place, uint32_t(end - begin), lane, party, tally);
    }
}

CK_DEVICE void report(const Tally& tally, uint64_t* counts, uint32_t record) {
    if (tally.lost) ck_atomic_add(counts + 2 * uint64_t(record), uint64_t(tally.lost));
    if (tally.nans) ck_atomic_add(counts + 2 * uint64_t(record) + 1, uint64_t(tally.nans));
}

template <class S, class D, class Q>
CK_KERNEL(THREADS, 3) void box_cast(Job<S, D, Q> job, const ck_desc* list, uint32_t count, uint64_t tiles, uint64_t* counts) {
    uint64_t tile = tiles * ck_bid() / ck_nb();
    const uint64_t end = tiles * (ck_bid() + 1) / ck_nb();
    if (tile >= end) return;
    for (uint32_t number = ck_find(list, count, tile);; ++number) {
        const ck_desc& d = list[number];
        const uint64_t next = number + 1 < count ? list[number + 1].tile0 : tiles;
        Tally tally;
        for (const uint64_t stop = next < end ? next : end; tile < stop; ++tile) {
            cast_tile(job, d, tile - d.tile0, tally);
            if ((tally.lost | tally.nans) >> 24) report(tally, counts, d.aux), tally = Tally();
        }
        report(tally, counts, d.aux);
        if (tile >= end) return;
    }
}

struct Call {
    const ck_desc* list;
    uint32_t count;
    uint64_t tiles;
    uint64_t* counts;
    int blocks, threads;
    void* stream;
};

template <class S, class D, class Q> int launch(const Call& c, S source, D target, Q scales) {
    using J = Job<S, D, Q>;
    const J job{source, target, scales};
    // 3 run at once in 80 registers: four waves of them, more where less is computed
    const int more = Q::SCALED ? 12 : J::STEP == 1 || J::OUT == 1 ? 96 : CK_EVERY;
    const int blocks = ck_fill_grid(c.blocks, ck_long(c.tiles, c.count) ? more : 12, c.tiles);
    if (blocks == 0) return ck_last_error();
    return CK_LAUNCH((box_cast<S, D, Q>), blocks, c.threads, c.stream, job, c.list, c.count, c.tiles, c.counts);
}
template <class F, class D> int cast(const Call& c, F from, D to) { return launch(c, Whole<F>{from}, to, Unscaled{}); }

int prepared(Call& c) {
    if (c.count == 0 || c.threads < 0 || c.threads % 32 || c.threads > THREADS) return cudaErrorInvalidValue;
    if (c.threads == 0) c.threads = THREADS;
    return cudaSuccess;
}

constexpr uint32_t pair(uint32_t source, uint32_t target) { return source << 8 | target; }
uint32_t bytes_of(uint32_t kind) { return kind == CK_F64 ? 8 : kind == CK_F32 ? 4 : kind == CK_BF16 || kind == CK_F16 ? 2 : 1; }

template <class D> int dequantised(const Call& c, uint32_t codes, D to, Scaled scales) {
    if (codes == CK_F4) return launch(c, Halves{}, to, scales);
    if (codes == CK_E4M3) return launch(c, Whole<ck_e4m3>{}, to, scales);
    return launch(c, Whole<ck_any8>{{codes}}, to, scales);
}

} // namespace

CK_API int ck_box_cast(const ck_desc* list, uint32_t count, uint64_t tiles, uint32_t source, uint32_t target, uint64_t* counts,
                       int blocks, int threads, void* stream) {
    if (source > CK_E5M2FNUZ || target > CK_E5M2FNUZ || source == target) return cudaErrorInvalidValue;
    if (tiles == 0) return cudaSuccess;
    Call c{list, count, tiles, counts, blocks, threads, stream};
    if (const int error = prepared(c)) return error;
    switch (pair(source, target)) {
    case pair(CK_F32, CK_BF16): return cast(c, ck_f32{}, ck_bf16{});
    case pair(CK_F32, CK_F16): return cast(c, ck_f32{}, ck_f16{});
    case pair(CK_F32, CK_E4M3): return cast(c, ck_f32{}, ck_e4m3{});
    case pair(CK_BF16, CK_F32): return cast(c, ck_bf16{}, ck_f32{});
    case pair(CK_BF16, CK_F16): return cast(c, ck_bf16{}, ck_f16{});
    case pair(CK_BF16, CK_E4M3): return cast(c, ck_bf16{}, ck_e4m3{});
    case pair(CK_F16, CK_F32): return cast(c, ck_f16{}, ck_f32{});
    case pair(CK_F16, CK_BF16): return cast(c, ck_f16{}, ck_bf16{});
    case pair(CK_F16, CK_E4M3): return cast(c, ck_f16{}, ck_e4m3{});
    case pair(CK_E4M3, CK_F32): return cast(c, ck_e4m3{}, ck_f32{});
    case pair(CK_E4M3, CK_BF16): return cast(c, ck_e4m3{}, ck_bf16{});
    case pair(CK_E4M3, CK_F16): return cast(c, ck_e4m3{}, ck_f16{});
    }
    const ck_f64 f64{target == CK_E4M3};
    const ck_to_f64 to_f64{source != CK_F16};
    switch (pair(bytes_of(source), bytes_of(target))) {
    case pair(8, 4): return cast(c, f64, ck_f32{});
    case pair(8, 2): return cast(c, f64, ck_any16{target});
    case pair(8, 1): return cast(c, f64, ck_any8{target});
    case pair(4, 8): return cast(c, ck_f32{}, to_f64);
    case pair(2, 8): return cast(c, ck_any16{source}, to_f64);
    case pair(1, 8): return cast(c, ck_any8{source}, to_f64);
    case pair(4, 1): return cast(c, ck_f32{}, ck_any8{target});
    case pair(2, 1): return cast(c, ck_any16{source}, ck_any8{target});
    case pair(1, 4): return cast(c, ck_any8{source}, ck_f32{});
    case pair(1, 2): return cast(c, ck_any8{source}, ck_any16{target});
    case pair(1, 1): return cast(c, ck_any8{source}, ck_any8{target});
    }
    return cudaErrorInvalidValue;
}

CK_API int ck_box_dequantise(const ck_desc* list, uint32_t count, uint64_t tiles, uint32_t codes, uint32_t target,
                             const ck_scales* scales, uint64_t* counts, int blocks, int threads, void* stream) {
    if (codes < CK_E4M3 || codes > CK_F4 || codes == CK_E8M0) return cudaErrorInvalidValue;
    if (target != CK_F32 && target != CK_BF16 && target != CK_F16) return cudaErrorInvalidValue;
    if (tiles == 0) return cudaSuccess;
    Call c{list, count, tiles, counts, blocks, threads, stream};
    if (const int error = prepared(c)) return error;
    if (target == CK_F32) return dequantised(c, codes, ck_f32{}, Scaled{scales});
    if (target == CK_BF16) return dequantised(c, codes, ck_bf16{}, Scaled{scales});
    return dequantised(c, codes, ck_f16{}, Scaled{scales});
}
