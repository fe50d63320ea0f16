// Floats by their bits: every type of a checkpoint to fp32 and back, the same bits on every machine.
//
// The one idea: each value of 4, 8 or 16 bits is an fp32, so a cast is `wide` then `narrow`, and fp64 goes by way of fp32 as
// torch's does. Rounding is to nearest, ties to even. Bits are moved by integers; the few sums and products of floats are exact,
// or are the one rounding that is wanted (no flush to zero: nvcc and g++ leave it off unless told).
//
// The bits are those of `ckpt_tool/run/compute.py` on x86, NaNs too: a NaN keeps its sign; fp16 <-> fp32 and bf16 -> fp32 keep
// what fits of its payload and don't make it quiet; to fp64 and from it, payload kept and quiet; to bf16 and from or to 8
// bits it is the plain quiet NaN.
// `lost` is what compute.cast counts: finite values that became infinite or NaN; for E4M3, which has no infinity and takes its
// largest value, all (infinities too) that lie beyond 464, halfway to the first that is not there.
//
// `quick_wide` and `quick_pair` are the same in fewer steps for groups of values that are nothing special: codes that are finite
// (`usual`; |value| <= TOP), and fp32 values below LIMIT, two at a time, the first in the lower half. Types that have them are
// HASTY. A code of 4 or 8 bits is widened by way of an f16 whose bits are its own, moved: a power of two less than what is wanted.
#pragma once
#include "portable.h"

// An element that may lie off its own grid: byte by byte there.
template <class B> CK_DEVICE B ck_load_anywhere(uint64_t address) {
    if (address % sizeof(B) == 0) return ck_load<B>(address);
    B value = 0;
    for (uint32_t k = 0; k < sizeof(B); ++k) value = B(value | B(ck_load<uint8_t>(address + k)) << (8 * k));
    return value;
}
template <class B> CK_DEVICE void ck_store_anywhere(uint64_t address, B value) {
    if (address % sizeof(B) == 0) return ck_store<B>(address, value);
    for (uint32_t k = 0; k < sizeof(B); ++k) ck_store<uint8_t>(address + k, uint8_t(value >> (8 * k)));
}

// -- one struct a type ----------------------------------------------------------------------------------------------------
// Bits: what holds it. wide: its fp32. narrow: an fp32 as it; `lost` counts.
template <class B, uint32_t N> struct alignas(sizeof(B) * N) ck_group {
    B v[N];
};

struct ck_f32 {
    using Bits = uint32_t;
    static constexpr bool HASTY = true, ANY = true; // ANY: quick_narrow takes every value
    static constexpr uint32_t TOP = 0x7F7FFFFFu, LIMIT = CK_INF;
    template <uint32_t N> CK_MEMBER bool usual(const ck_group<uint32_t, N>&) const { return true; }
    template <uint32_t N> CK_MEMBER void quick_wide(const ck_group<uint32_t, N>& g, uint32_t (&bits)[N]) const {
        CK_UNROLL
        for (uint32_t k = 0; k < N; ++k) bits[k] = g.v[k];
    }
    CK_MEMBER uint32_t wide(uint32_t b, uint32_t&) const { return b; }
    CK_MEMBER uint32_t narrow(uint32_t v, uint32_t&) const { return v; }
};

struct ck_bf16 {
    using Bits = uint16_t;
    static constexpr bool HASTY = true, ANY = false;
    static constexpr uint32_t TOP = 0x7F7F0000u, LIMIT = 0x7F7F8000u;
    template <uint32_t N> CK_MEMBER bool usual(const ck_group<uint16_t, N>&) const { return true; }
    template <uint32_t N> CK_MEMBER void quick_wide(const ck_group<uint16_t, N>& g, uint32_t (&bits)[N]) const {
        uint32_t words[N / 2];
        memcpy(words, &g, sizeof words);
        CK_UNROLL
        for (uint32_t k = 0; k < N / 2; ++k) {
            bits[2 * k] = words[k] << 16;
            bits[2 * k + 1] = words[k] & 0xFFFF0000u;
        }
    }
    CK_MEMBER uint32_t quick_pair(uint32_t a, uint32_t b) const { return ck_pair_bf16(a, b); }
    CK_MEMBER uint32_t wide(uint16_t b, uint32_t&) const { return uint32_t(b) << 16; }
    CK_MEMBER uint16_t narrow(uint32_t v, uint32_t& lost) const {
        const uint32_t abs = v & ~CK_SIGN;
        if (abs > CK_INF) return uint16_t((v & CK_SIGN) >> 16 | CK_NAN >> 16);
        lost += abs < CK_INF && abs >= LIMIT;
        return uint16_t((v + 0x7FFF + (v >> 16 & 1)) >> 16);
    }
};

struct ck_f16 {
    using Bits = uint16_t;
    static constexpr bool HASTY = true, ANY = false;
    static constexpr uint32_t TOP = 0x477FE000u, LIMIT = 0x477FF000u; // 65504; 65520 is halfway to 2^16
    template <uint32_t N> CK_MEMBER bool usual(const ck_group<uint16_t, N>& g) const {
        uint32_t words[N / 2], full = 0; // in the top bit of each half: is its exponent full?
        memcpy(words, &g, sizeof words);
        CK_UNROLL
        for (uint32_t k = 0; k < N / 2; ++k) full |= (words[k] & 0x7C007C00) + 0x04000400;
        return !(full & 0x80008000u);
    }
    template <uint32_t N> CK_MEMBER void quick_wide(const ck_group<uint16_t, N>& g, uint32_t (&bits)[N]) const {
        uint32_t words[N / 2];
        memcpy(words, &g, sizeof words);
        CK_UNROLL
        for (uint32_t k = 0; k < N / 2; ++k) ck_widen_f16(words[k], bits[2 * k], bits[2 * k + 1]);
    }
    CK_MEMBER uint32_t quick_pair(uint32_t a, uint32_t b) const { return ck_pair_f16(a, b); }
    CK_MEMBER uint32_t wide(uint16_t b, uint32_t&) const {
        const uint32_t sign = uint32_t(b & 0x8000) << 16, code = b & 0x7FFF;
        return sign | (code >= 0x7C00 ? CK_INF | (code & 0x3FF) << 13 : ck_widen<10, 15>(code));
    }
    CK_MEMBER uint16_t narrow(uint32_t v, uint32_t& lost) const {
        const uint32_t sign = v >> 16 & 0x8000, abs = v & ~CK_SIGN;
        if (abs > CK_INF) {
            const uint32_t payload = abs >> 13 & 0x3FF;
            return uint16_t(sign | 0x7C00 | (payload ? payload : 1));
        }
        const bool beyond = abs >= LIMIT;
        lost += beyond && abs < CK_INF;
        return uint16_t(sign | (beyond ? 0x7C00 : ck_narrow<10, 15>(abs)));
    }
};

struct ck_e4m3 {
    using Bits = uint8_t;
    static constexpr bool HASTY = true, ANY = false;
    static constexpr uint32_t TOP = 0x43E00000u, LIMIT = 0x43E00001u; // 448
    template <uint32_t N> CK_MEMBER bool usual(const ck_group<uint8_t, N>& g) const {
        uint32_t words[N / 4], full = 0; // in the top bit of each byte: are all others set?
        memcpy(words, &g, sizeof words);
        CK_UNROLL
        for (uint32_t k = 0; k < N / 4; ++k) full |= (words[k] & 0x7F7F7F7F) + 0x01010101;
        return !(full & 0x80808080u);
    }
    template <uint32_t N> CK_MEMBER void quick_wide(const ck_group<uint8_t, N>& g, uint32_t (&bits)[N]) const {
        uint32_t words[N / 4];
        memcpy(words, &g, sizeof words);
        CK_UNROLL
        for (uint32_t k = 0; k < N; k += 4)
            CK_UNROLL
            for (uint32_t odd = 0; odd < 2; ++odd) { // codes 0 and 2, then 1 and 3: in the upper bytes of halves
                const uint32_t w = odd ? words[k / 4] : words[k / 4] << 8;
                uint32_t a, b;
                ck_widen_f16((w & 0x80008000u) | (w >> 1 & 0x3F803F80u), a, b);
                bits[k + odd] = ck_bits(ck_float(a) * 0x1p8f);
                bits[k + odd + 2] = ck_bits(ck_float(b) * 0x1p8f);
            }
    }
    CK_MEMBER uint32_t quick_pair(uint32_t a, uint32_t b) const { return ck_pair_e4m3(a, b); }
    CK_MEMBER uint32_t wide(uint8_t b, uint32_t&) const {
        const uint32_t sign = uint32_t(b & 0x80) << 24, code = b & 0x7F;
        return sign | (code == 0x7F ? CK_NAN : ck_widen<3, 7>(code));
    }
    CK_MEMBER uint8_t narrow(uint32_t v, uint32_t& lost) const {
        const uint32_t sign = v >> 24 & 0x80, abs = v & ~CK_SIGN;
        if (abs > CK_INF) return uint8_t(sign | 0x7F);
        lost += abs > 0x43E80000u; // 464
        return uint8_t(sign | (abs >= LIMIT ? 0x7E : ck_narrow<3, 7>(abs)));
    }
};

struct ck_e5m2 {
    using Bits = uint8_t;
    CK_MEMBER uint32_t wide(uint8_t b, uint32_t&) const {
        const uint32_t sign = uint32_t(b & 0x80) << 24, code = b & 0x7F;
        return sign | (code > 0x7C ? CK_NAN : code == 0x7C ? CK_INF : ck_widen<2, 15>(code));
    }
    CK_MEMBER uint8_t narrow(uint32_t v, uint32_t& lost) const {
        const uint32_t sign = v >> 24 & 0x80, abs = v & ~CK_SIGN;
        if (abs > CK_INF) return uint8_t(sign | 0x7E);
        const bool beyond = abs >= 0x47700000u; // 61440, halfway from 57344 to 2^16
        lost += beyond && abs < CK_INF;
        return uint8_t(sign | (beyond ? 0x7C : ck_narrow<2, 15>(abs)));
    }
};

// The FNUZ types: no infinity, no -0; 0x80 is the only NaN, and takes what lies beyond.
template <int M, int BIAS> struct ck_fnuz {
    using Bits = uint8_t;
    CK_MEMBER uint32_t wide(uint8_t b, uint32_t&) const {
        return b == 0x80 ? CK_SIGN | CK_NAN : uint32_t(b & 0x80) << 24 | ck_widen<M, BIAS>(b & 0x7F);
    }
    CK_MEMBER uint8_t narrow(uint32_t v, uint32_t& lost) const {
        const uint32_t abs = v & ~CK_SIGN;
        if (abs > CK_INF) return 0x80;
        const uint32_t code = ck_narrow<M, BIAS>(abs);
        lost += code > 0x7F && abs < CK_INF;
        return uint8_t(code > 0x7F ? 0x80 : code ? (v >> 24 & 0x80) | code : 0);
    }
};
using ck_e4m3fnuz = ck_fnuz<3, 8>;
using ck_e5m2fnuz = ck_fnuz<2, 16>;

// Powers of two without a sign: 2^(code - 127), 255 is NaN, and takes 0 and all below it. Halfway (1.5)
// goes up. All as ml_dtypes 0.6 does it.
struct ck_e8m0 {
    using Bits = uint8_t;
    CK_MEMBER uint32_t wide(uint8_t b, uint32_t&) const {
        return b == 255 ? CK_NAN : b ? uint32_t(b) << 23 : 1u << 22;
    }
    CK_MEMBER uint8_t narrow(uint32_t v, uint32_t& lost) const {
        const uint32_t abs = v & ~CK_SIGN;
        // 2^-127 is 0x400000, below the normal ones: all that is smaller becomes it, and all between it and 2^-126 that
        const uint32_t code = abs < 0x800000 ? uint32_t(abs > 0x400000) : (abs + 0x400000) >> 23;
        const bool none = v == 0 || v >= CK_SIGN || code > 254;
        lost += none && abs < CK_INF;
        return uint8_t(none ? 255 : code);
    }
};

struct ck_i8 { // codes only
    using Bits = uint8_t;
    CK_MEMBER uint32_t wide(uint8_t b, uint32_t&) const { return ck_bits(float(int8_t(b))); }
};

// E2M1, half a byte, the low four bits of b: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign.
struct ck_f4 {
    static constexpr bool HASTY = true;
    static constexpr uint32_t TOP = 0x40C00000u; // 6
    template <uint32_t N> CK_MEMBER void quick_wide(const ck_group<uint8_t, N / 2>& g, uint32_t (&bits)[N]) const {
        constexpr uint32_t FEW = N < 8 ? N : 8, FAR = FEW / 2; // codes at a time; how far those of a pair are apart
        CK_UNROLL
        for (uint32_t k = 0; k < N; k += FEW) {
            uint32_t word = 0;
            memcpy(&word, g.v + k / 2, FEW / 2);
            if (FEW == 4) word = (word & 0xFF) | word >> 8 << 16; // codes 0, 1 and 2, 3 in halves of their own
            CK_UNROLL
            for (uint32_t j = 0; j < FAR; ++j) { // codes j and j + FAR, at the top of halves
                const uint32_t w = word << (12 - 4 * j);
                uint32_t a, b;
                ck_widen_f16((w & 0x80008000u) | (w >> 3 & 0x0E000E00u), a, b);
                bits[k + j] = ck_bits(ck_float(a) * 0x1p14f);
                bits[k + j + FAR] = ck_bits(ck_float(b) * 0x1p14f);
            }
        }
    }
    CK_MEMBER uint32_t wide(uint8_t b, uint32_t&) const {
        const uint32_t sign = uint32_t(b & 8) << 28, code = b & 7;
        return sign | (code > 1 ? (code << 22) + (126u << 23) : code ? 126u << 23 : 0);
    }
};

// By way of fp32, as torch does; infinities made on the way are lost, unless the target counts all infinities (E4M3).
struct ck_f64 {
    using Bits = uint64_t;
    static constexpr bool HASTY = false;
    uint32_t counted_later;
    CK_MEMBER uint32_t wide(uint64_t b, uint32_t& lost) const {
        const uint32_t sign = uint32_t(b >> 32) & CK_SIGN;
        const uint64_t abs = b & ~(uint64_t(1) << 63), mantissa = abs & ((uint64_t(1) << 52) - 1);
        const int exponent = int(abs >> 52) - 896; // biased as fp32's
        if (exponent == 2047 - 896) return sign | CK_INF | (mantissa ? 0x400000u | uint32_t(mantissa >> 29) : 0);
        if (exponent < -23) return sign; // below half of 2^-149
        const int shift = exponent > 0 ? 29 : 30 - exponent;
        const uint64_t whole = mantissa | uint64_t(1) << 52;
        const uint32_t rounded = uint32_t((whole + (uint64_t(1) << (shift - 1)) - 1 + (whole >> shift & 1)) >> shift);
        // the leading bit of a normal one adds 1 to the exponent
        const uint32_t value = exponent > 254 ? CK_INF : exponent > 0 ? (uint32_t(exponent - 1) << 23) + rounded : rounded;
        lost += value == CK_INF && !counted_later;
        return sign | value;
    }
};

// fp64 as a target. From fp16 NumPy does not make NaNs quiet.
struct ck_to_f64 {
    using Bits = uint64_t;
    static constexpr bool HASTY = false;
    uint32_t quiet;
    CK_MEMBER uint64_t narrow(uint32_t v, uint32_t&) const {
        const uint64_t sign = uint64_t(v & CK_SIGN) << 32;
        const uint32_t abs = v & ~CK_SIGN;
        if (abs > CK_INF) return sign | uint64_t(0x7FF) << 52 | uint64_t(quiet) << 51 | uint64_t(abs & 0x7FFFFF) << 29;
        if (abs == CK_INF) return sign | uint64_t(0x7FF) << 52;
        if (abs >> 23) return sign | ((uint64_t(abs) << 29) + (uint64_t(896) << 52));
        const uint64_t least = uint64_t(897) << 52, value = least | uint64_t(abs) << 29; // 1.m * 2^-126 less 2^-126
        double a, b;
        memcpy(&a, &value, 8);
        memcpy(&b, &least, 8);
        return sign | ck_bits(a - b);
    }
};

// -- types that are told when the kernel runs: for the pairs that nobody is in a hurry with -------------------------------
struct ck_any8 {
    using Bits = uint8_t;
    static constexpr bool HASTY = false;
    uint32_t kind;
    CK_MEMBER uint32_t wide(uint8_t b, uint32_t& lost) const {
        switch (kind) {
        case CK_E5M2: return ck_e5m2().wide(b, lost);
        case CK_E8M0: return ck_e8m0().wide(b, lost);
        case CK_E4M3FNUZ: return ck_e4m3fnuz().wide(b, lost);
        case CK_E5M2FNUZ: return ck_e5m2fnuz().wide(b, lost);
        case CK_I8: return ck_i8().wide(b, lost);
        default: return ck_e4m3().wide(b, lost);
        }
    }
    CK_MEMBER uint8_t narrow(uint32_t v, uint32_t& lost) const {
        switch (kind) {
        case CK_E5M2: return ck_e5m2().narrow(v, lost);
        case CK_E8M0: return ck_e8m0().narrow(v, lost);
        case CK_E4M3FNUZ: return ck_e4m3fnuz().narrow(v, lost);
        case CK_E5M2FNUZ: return ck_e5m2fnuz().narrow(v, lost);
        default: return ck_e4m3().narrow(v, lost);
        }
    }
};

struct ck_any16 {
    using Bits = uint16_t;
    static constexpr bool HASTY = false;
    uint32_t kind;
    CK_MEMBER uint32_t wide(uint16_t b, uint32_t& lost) const {
        return kind == CK_F16 ? ck_f16().wide(b, lost) : ck_bf16().wide(b, lost);
    }
    CK_MEMBER uint16_t narrow(uint32_t v, uint32_t& lost) const {
        return kind == CK_F16 ? ck_f16().narrow(v, lost) : ck_bf16().narrow(v, lost);
    }
};
