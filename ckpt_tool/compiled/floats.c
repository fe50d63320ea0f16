/* Floats of GGUF's blocks: scale * code - least, group by group, in the order of gguf's quants.py. As in blocks.c the
   arithmetic is stated operation by operation, and what is not finite is left to the caller. */

#include "arrays.h"

enum { GROUP = 16, NONE = -1 }; /* elements that have one scale at least */

/* Where the bits of codes lie: from byte `at` of a block on, `bits` of each. A run of bytes holds the lowest bits of `run`
   elements, behind them those of the next `run`, until its bits are used up. */
typedef struct {
    int at, bits, run;
} ck_packed;

typedef struct {
    int nbytes, elements, group; /* of a block; elements that have one scale */
    int scale, least;            /* bytes of a half-precision number; NONE */
    ck_packed low, high;         /* the codes' lower and upper bits, 0 of these where there are none */
    int bias;                    /* what a code stands for: itself less this, */
    const int8_t *table;         /* or an entry of a table */
} ck_type;

static const int8_t DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
static const int8_t CURVE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const ck_type OF[TYPES] = {
    [Q4_0] = {18, 32, 32, 0, NONE, {2, 4, 16}, {0, 0, 0}, 8, 0},
    [Q4_1] = {20, 32, 32, 0, 2, {4, 4, 16}, {0, 0, 0}, 0, 0},
    [Q5_0] = {22, 32, 32, 0, NONE, {6, 4, 16}, {2, 1, 1}, 16, 0},
    [Q5_1] = {24, 32, 32, 0, 2, {8, 4, 16}, {4, 1, 1}, 0, 0},
    [Q8_0] = {34, 32, 32, 0, NONE, {2, 8, 32}, {0, 0, 0}, 0, 0},
    [MXFP4] = {17, 32, 32, NONE, NONE, {1, 4, 16}, {0, 0, 0}, 0, DOUBLED},
    [TQ2_0] = {66, 256, 256, 64, NONE, {0, 2, 32}, {0, 0, 0}, 1, 0},
    [IQ4_NL] = {18, 32, 32, 0, NONE, {2, 4, 16}, {0, 0, 0}, 0, CURVE},
    [IQ4_XS] = {136, 256, 32, 0, NONE, {8, 4, 16}, {0, 0, 0}, 0, CURVE},
    [Q2_K] = {84, 256, 16, 80, 82, {16, 2, 32}, {0, 0, 0}, 0, 0},
    [Q3_K] = {110, 256, 16, 108, NONE, {32, 2, 32}, {0, 1, 32}, 4, 0},
    [Q4_K] = {144, 256, 32, 0, 2, {16, 4, 32}, {0, 0, 0}, 0, 0},
    [Q5_K] = {176, 256, 32, 0, 2, {48, 4, 32}, {16, 1, 32}, 0, 0},
    [Q6_K] = {210, 256, 16, 208, NONE, {0, 4, 64}, {128, 2, 32}, 32, 0},
};

INLINE void runs_of_codes(const uint8_t *in, int bits, int run, int elements, uint8_t *restrict out)
{
    for (const uint8_t *end = in + elements * bits / 8; in < end; in += run)
        for (int low = 0; low < 8; low += bits, out += run)
            for (int j = 0; j < run; j++)
                out[j] = in[j] >> low & ((1 << bits) - 1);
}

/* A byte for each code of a block; the length of a run is a constant, so that loops are vectors. */
static void unpacked(const uint8_t *block, ck_packed codes, int elements, uint8_t *out)
{
    const uint8_t *in = block + codes.at;
    switch (codes.bits << 8 | codes.run) {
    case 8 << 8 | 32: memcpy(out, in, (size_t)elements); break;
    case 4 << 8 | 16: runs_of_codes(in, 4, 16, elements, out); break;
    case 4 << 8 | 32: runs_of_codes(in, 4, 32, elements, out); break;
    case 4 << 8 | 64: runs_of_codes(in, 4, 64, elements, out); break;
    case 2 << 8 | 32: runs_of_codes(in, 2, 32, elements, out); break;
    case 1 << 8 | 32: runs_of_codes(in, 1, 32, elements, out); break;
    default: runs_of_codes(in, 1, 1, elements, out);
    }
}

/* The number of two bytes. odd: 1 where it is none, or infinite. */
INLINE float of_half(const uint8_t *in, int *odd)
{
    uint16_t half;
    memcpy(&half, in, 2);
    *odd |= (half & 0x7C00) == 0x7C00;
    const float size = float_of((half & 0x7FFFu) << 13) * float_of(239u << 23); /* 2^112 */
    return float_of(bits_of(size) | (uint32_t)(half & 0x8000) << 16);
}

/* Scales and least values of a block's groups. Returns 1 where a half-precision number is not finite. */
static int scales_of(const uint8_t *block, int type, float *scales, float *leasts)
{
    const int groups = OF[type].elements / OF[type].group;
    int odd = 0;
    if (type == MXFP4) {
        scales[0] = float_of(block[0] < 2 ? 0x00200000u << block[0] : (block[0] - 1u) << 23);
        return 0;
    }
    const float d = of_half(block + OF[type].scale, &odd);
    const float least = OF[type].least == NONE ? 0 : of_half(block + OF[type].least, &odd);
    for (int g = 0; g < groups; g++) {
        int scale = 1;
        switch (type) {
        case Q4_1:
        case Q5_1: leasts[g] = -least; break;
        case Q4_K:
        case Q5_K: {
            const uint8_t *six = block + 4 + g % 4;
            scale = g < 4 ? six[0] & 63 : (six[8] & 15) | (six[0] >> 2 & 48);
            leasts[g] = least * (float)(g < 4 ? six[4] & 63 : six[8] >> 4 | (six[4] >> 2 & 48));
            break;
        }
        case Q2_K:
            scale = block[g] & 15;
            leasts[g] = least * (float)(block[g] >> 4);
            break;
        case Q3_K:
            scale = ((block[96 + g % 8] >> g / 8 * 4 & 15) | (block[104 + g % 4] >> g / 4 * 2 & 3) << 4) - 32;
            break;
        case IQ4_XS:
            scale = ((block[4 + g / 2] >> g % 2 * 4 & 15) | (block[2 + g / 4] >> g % 4 * 2 & 3) << 4) - 32;
            break;
        case Q6_K: scale = (int8_t)block[192 + g]; break;
        }
        scales[g] = d * (float)scale;
    }
    return odd;
}

/* The numbers that blocks stand for. Returns 1, and `out` is void, where a scale or a value is not finite, or becomes so,
   and for a type that is not known here. Loop by loop: what one stores has left the pipeline when the next reads it. */
API int NAMED(ck_floats)(const uint8_t *in, int type, int64_t blocks, void *out, int kind)
{
    if (type < 0 || type >= TYPES)
        return 1;
    const ck_type *of = OF + type;
    const int every = CHUNK / of->elements, groups = of->elements / of->group, shift = of->low.bits;
    int odd = 0, few;
    for (int64_t at = 0; at < blocks; at += few) {
        uint8_t low[CHUNK], high[CHUNK];
        int8_t units[CHUNK];
        float values[CHUNK], scales[CHUNK / GROUP], leasts[CHUNK / GROUP];
        few = blocks - at < every ? (int)(blocks - at) : every;
        const int count = few * of->elements;
        memset(leasts, 0, sizeof leasts); /* x - 0 is x, whatever the sign of a zero */
        for (int b = 0; b < few; b++) {
            const uint8_t *block = in + (at + b) * of->nbytes;
            odd |= scales_of(block, type, scales + b * groups, leasts + b * groups);
            unpacked(block, of->low, of->elements, low + b * of->elements);
            if (of->high.bits)
                unpacked(block, of->high, of->elements, high + b * of->elements);
        }
        if (of->high.bits)
            for (int i = 0; i < count; i++)
                low[i] |= (uint8_t)(high[i] << shift);
        if (of->table)
            for (int i = 0; i < count; i++)
                units[i] = of->table[low[i]];
        else
            for (int i = 0; i < count; i++)
                units[i] = (int8_t)(low[i] - of->bias);
        for (int g = 0, i = 0; g < few * groups; g++)
            for (const int end = i + of->group; i < end; i += GROUP)
                for (int j = i; j < i + GROUP; j++)
                    values[j] = scales[g] * (float)units[j] - leasts[g];
        odd |= narrow(values, count, out, kind, at * of->elements);
    }
    return odd;
}
