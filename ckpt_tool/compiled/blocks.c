/* Work on blocks that lie in L2, in one pass where NumPy takes several: sums of models, thin products,
   codes and scales, blocks of GGUF, transposes.

   The arithmetic is stated operation by operation, so that the bits are those of the NumPy implementation of each call
   (ckpt_tool/compiled/library.py says which): no fast-math, no contraction (-ffp-contract=off), fused multiply-adds
   only where they are written. What has to be counted or keeps a payload (infinity, NaN, what rounds to infinity) is
   not decided here: the call returns 1, and the caller uses the NumPy implementation for that block. */

#include "arrays.h"

/* out = sum_i w_i in_i / total, by steps of float(double(x) * w + sum), from the sum 0. w: fp32 values. A product of
   two fp32 is exact in fp64, so that the first step is one rounding, and fp32 does it alone. */
API int NAMED(ck_linear)(int count, const void *const *in, const int *kinds, const double *weights, float total,
                         int64_t n, void *out, int kind)
{
    int odd = 0;
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int few = n - at < CHUNK ? (int)(n - at) : CHUNK;
        float sums[CHUNK], values[CHUNK];
        for (int k = 0; k < count; k++) {
            const double weight = weights[k];
            const float first = (float)weight;
            widen(in[k], kinds[k], at, few, values);
            if (k == 0)
                for (int i = 0; i < few; i++)
                    sums[i] = values[i] * first + 0.0f;
            else
                for (int i = 0; i < few; i++)
                    sums[i] = (float)((double)values[i] * weight + (double)sums[i]);
        }
        if (total != 1.0f)
            for (int i = 0; i < few; i++)
                sums[i] /= total;
        odd |= narrow(sums, few, out, kind, at);
    }
    return odd;
}

/* -- thin products: one chain of fused multiply-adds an element, parted every LENGTH (ckpt_tool/adapters/chain.py) -- */

#if defined(__AVX512F__)
enum { LANES = 16 };
#define FUSE(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))
#elif defined(__FMA__)
enum { LANES = 8 };
#define FUSE(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b))
#elif defined(__aarch64__)
enum { LANES = 4 };
#define FUSE(sum, a, b) __asm__("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(a), "w"(b))
#endif

typedef struct {
    const float *left;  /* (rows, rank) */
    const float *right; /* panels of PAIR columns: (panels, rank, PAIR), the last padded by zeros */
    int64_t rank;
    float scaling;
} ck_term;

#if defined(FUSE)
typedef float floats __attribute__((vector_size(4 * LANES)));
#define EVERY(x) ((x) - (floats){0}) /* and not + 0, which -0 does not survive */
enum { LENGTH = 320, ROWS = 6, PAIR = 2 * LANES };
enum { KEPT = 16 << 10 }; /* bytes of panels that stay in L1 while rows pass by */

/* A panel's columns of `rows` rows: line += scaling * (left @ panel), lines CHUNK floats apart. */
INLINE void chains(int rows, const float *left, const float *panel, int64_t rank, float scaling, float *line)
{
    floats total[ROWS][2];
    for (int64_t start = 0; start < rank || start == 0; start += LENGTH) {
        const int64_t stop = rank < start + LENGTH ? rank : start + LENGTH;
        floats sums[ROWS][2];
        for (int r = 0; r < rows; r++)
            sums[r][0] = sums[r][1] = EVERY(0.0f);
        for (int64_t k = start; k < stop; k++) {
            floats a, b;
            memcpy(&a, panel + k * PAIR, sizeof a);
            memcpy(&b, panel + k * PAIR + LANES, sizeof b);
            for (int r = 0; r < rows; r++) {
                const floats one = EVERY(left[r * rank + k]);
                FUSE(sums[r][0], one, a);
                FUSE(sums[r][1], one, b);
            }
        }
        if (start == 0)
            memcpy(total, sums, sizeof total);
        else
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < 2; i++)
                    total[r][i] += sums[r][i];
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) {
            floats value, *place = (floats *)(void *)(line + r * CHUNK + i * LANES);
            memcpy(&value, place, sizeof value);
            value += total[r][i] * EVERY(scaling);
            memcpy(place, &value, sizeof value);
        }
}

typedef struct {
    const void *base;
    void *out;
    int kind_in, kind_out;
    int64_t origin, width; /* the element that base and out begin with, columns of the matrix */
    int terms;
    const ck_term *term;
} ck_fold;

/* Columns [low, high), at most CHUNK - PAIR, of rows [row, row + rows). */
INLINE int folded_tile(const ck_fold *fold, int rows, int64_t row, int64_t low, int64_t high)
{
    const int64_t begin = low / PAIR * PAIR;
    const int few = (int)(high - low), skip = (int)(low - begin);
    float lines[ROWS * CHUNK];
    int odd = 0;
    for (int r = 0; r < rows; r++)
        widen(fold->base, fold->kind_in, (row + r) * fold->width + low - fold->origin, few, lines + r * CHUNK + skip);
    for (int t = 0; t < fold->terms; t++) {
        const ck_term *one = fold->term + t;
        for (int64_t at = begin; at < high; at += PAIR)
            chains(rows, one->left + row * one->rank, one->right + at * one->rank, one->rank, one->scaling,
                   lines + (at - begin));
    }
    for (int r = 0; r < rows; r++)
        odd |= narrow(lines + r * CHUNK + skip, few, fold->out, fold->kind_out,
                      (row + r) * fold->width + low - fold->origin);
    return odd;
}

/* Columns [low, high) of rows [first, last): as many columns at a time as have their panels in L1. */
static int folded_rows(const ck_fold *fold, int64_t first, int64_t last, int64_t low, int64_t high)
{
    int64_t rank = 1;
    int odd = 0;
    for (int t = 0; t < fold->terms; t++)
        rank = rank > fold->term[t].rank ? rank : fold->term[t].rank;
    int64_t columns = KEPT / 4 / rank / PAIR * PAIR;
    columns = columns < PAIR ? PAIR : columns > CHUNK - PAIR ? CHUNK - PAIR : columns;
    for (int64_t c = low; c < high;) {
        const int64_t end = c / PAIR * PAIR + columns < high ? c / PAIR * PAIR + columns : high;
        int64_t row = first;
        for (; row + ROWS <= last; row += ROWS)
            odd |= folded_tile(fold, ROWS, row, c, end);
        for (; row + 3 <= last; row += 3)
            odd |= folded_tile(fold, 3, row, c, end);
        for (; row < last; row++)
            odd |= folded_tile(fold, 1, row, c, end);
        c = end;
    }
    return odd;
}

/* Elements [start, stop) of the row-major line of a matrix with `width` columns: base + s (left @ right), term after
   term; base and out begin with element `start`. */
API int NAMED(ck_folded)(const void *base, int kind_in, void *out, int kind_out, int64_t start, int64_t stop,
                         int64_t width, int terms, const ck_term *term)
{
    const ck_fold fold = {base, out, kind_in, kind_out, start, width, terms, term};
    const int64_t head = start / width, full = (start + width - 1) / width, end = stop / width;
    int odd = 0;
    if (head == stop / width) /* within one row */
        return folded_rows(&fold, head, head + 1, start - head * width, stop - head * width);
    if (head < full)
        odd |= folded_rows(&fold, head, full, start - head * width, width);
    odd |= folded_rows(&fold, full, end, 0, width);
    if (end * width < stop)
        odd |= folded_rows(&fold, end, end + 1, 0, stop - end * width);
    return odd;
}

/* Columns that are made at a time: `wide` must be a multiple of it. 0: this machine has no fused multiply-add. */
API int NAMED(ck_pair)(void) { return PAIR; }
#else
API int NAMED(ck_pair)(void) { return 0; }

API int NAMED(ck_folded)(const void *base, int kind_in, void *out, int kind_out, int64_t start, int64_t stop,
                         int64_t width, int terms, const ck_term *term)
{
    (void)base, (void)kind_in, (void)out, (void)kind_out, (void)start, (void)stop, (void)width, (void)terms, (void)term;
    return 1;
}
#endif

/* -- codes: to nearest, ties to even (ckpt_tool/quantised/nearest_codes.py) ---------------------------------------------- */

enum { E4M3 = 0, I8 = 1, I4 = 2, E2M1 = 3 };
enum { PER = 4, SUMS = 4 }; /* numbers of a vector that every processor has, vectors that are summed side by side */
enum { FULL = 128 };        /* elements of a block that are coded in loops of a length that the compiler knows */
typedef float singles __attribute__((vector_size(4 * PER)));
typedef double doubles __attribute__((vector_size(8 * PER)));

typedef struct {
    uint32_t most[PER * SUMS]; /* bits of the largest distances, side by side too */
    doubles far[SUMS], of[SUMS];
} ck_sums;

/* out[r * pitch + block] = max(itself, the largest magnitude of the block), blocks of `width` columns. Where a value is
   no finite number, so is what is found. */
API void NAMED(ck_largest)(const void *in, int kind, int64_t rows, int64_t columns, int64_t width, int64_t pitch,
                           float *out)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t at = 0, block = 0; at < columns; at += width, block++) {
            const int64_t count = columns - at < width ? columns - at : width;
            uint32_t *place = (uint32_t *)(void *)(out + r * pitch + block), most;
            memcpy(&most, place, 4);
            if (kind == BF16) {
                const uint16_t *half = (const uint16_t *)in + r * columns + at;
                uint16_t top = 0;
                for (int64_t i = 0; i < count; i++) {
                    const uint16_t size = half[i] & 0x7FFF;
                    top = top > size ? top : size;
                }
                most = most > (uint32_t)top << 16 ? most : (uint32_t)top << 16;
            } else {
                const float *wide = (const float *)in + r * columns + at;
                for (int64_t i = 0; i < count; i++) {
                    const uint32_t size = bits_of(wide[i]) & 0x7FFFFFFF;
                    most = most > size ? most : size;
                }
            }
            memcpy(place, &most, 4);
        }
}

/* The code nearest to a quotient, and in `made` what it stands for. A float's last bits that are kept have the weight
   that the last bit of fp32 has beside a larger power of two: adding that power rounds, and its own bits count steps. */
INLINE uint32_t coded(float ratio, int to, float *made)
{
    if (to == I8 || to == I4) {
        const float low = to == I8 ? -128.0f : -8.0f, high = to == I8 ? 127.0f : 7.0f;
        float cut = ratio < low ? low : ratio;
        cut = cut > high ? high : cut;
        *made = (cut + 12582912.0f) - 12582912.0f;
        return (uint32_t)(int32_t)*made;
    }
    const int kept = to == E4M3 ? 3 : 1; /* bits of the fraction */
    const float most = to == E4M3 ? 448.0f : 6.0f;
    const uint32_t least = (to == E4M3 ? 121u : 127u) << 23; /* the exponent below which steps grow no smaller */
    if (to == E2M1)
        ratio += 0.0f; /* a negative zero is none */
    const uint32_t bits = bits_of(ratio);
    float size = float_of(bits & 0x7FFFFFFF);
    size = size < most ? size : most;
    uint32_t power = bits_of(size) & 0x7F800000;
    power = power > least ? power : least;
    const uint32_t beside = power + ((23u - kept) << 23);
    const float sum = size + float_of(beside);
    *made = float_of(bits_of(sum - float_of(beside)) | (bits & 0x80000000));
    return (bits_of(sum) - beside + ((power - least) >> (23 - kept))) | bits >> 31 << (to == E4M3 ? 7 : 3);
}

/* GCC 12 makes two halves of a vector of __builtin_convertvector, which takes three times as long. */
#if defined(__AVX__) && !defined(__clang__)
#define WIDE(x) __builtin_ia32_cvtps2pd256(x)
#else
#define WIDE(x) __builtin_convertvector(x, doubles)
#endif

/* At most FULL elements of one block: their codes, and how far the codes times `divisor` are from them. Loop by loop, so
   that each has what it needs in registers. */
INLINE void few_codes(const void *in, int kind, int64_t at, int few, float divisor, int to, uint8_t *out, ck_sums *sums)
{
    float values[FULL], far[FULL];
    uint32_t codes[FULL];
    widen(in, kind, at, few, values);
    for (int i = 0; i < few; i++) {
        float made;
        codes[i] = coded(values[i] / divisor, to, &made);
        far[i] = values[i] - made * divisor;
    }
    for (int i = 0; i < few; i++)
        out[i] = (uint8_t)codes[i];
    ck_sums own = *sums; /* in registers */
    const int even = few / (PER * SUMS) * (PER * SUMS);
    for (int i = 0; i < even; i += PER * SUMS)
        for (int k = 0; k < PER * SUMS; k++) {
            const uint32_t size = bits_of(far[i + k]) & 0x7FFFFFFF;
            own.most[k] = own.most[k] > size ? own.most[k] : size;
        }
    for (int i = 0; i < even; i += PER * SUMS)
        _Pragma("GCC unroll 4") for (int k = 0; k < SUMS; k++)
        {
            singles f, v;
            memcpy(&f, far + i + PER * k, sizeof f);
            memcpy(&v, values + i + PER * k, sizeof v);
            const doubles df = WIDE(f), dv = WIDE(v);
            own.far[k] += df * df;
            own.of[k] += dv * dv;
        }
    for (int i = even; i < few; i++) {
        const uint32_t size = bits_of(far[i]) & 0x7FFFFFFF;
        own.most[0] = own.most[0] > size ? own.most[0] : size;
        own.far[0][0] += (double)far[i] * (double)far[i];
        own.of[0][0] += (double)values[i] * (double)values[i];
    }
    *sums = own;
}

INLINE void block_codes(const void *in, int kind, int64_t at, int64_t count, float divisor, int to, uint8_t *out,
                        ck_sums *sums)
{
    int64_t begin = 0;
    for (; begin + FULL <= count; begin += FULL)
        few_codes(in, kind, at + begin, FULL, divisor, to, out + begin, sums);
    if (begin < count)
        few_codes(in, kind, at + begin, (int)(count - begin), divisor, to, out + begin, sums);
}

INLINE void all_codes(const void *in, int kind, int64_t rows, int64_t columns, int64_t skip, int64_t width,
                      const float *divisors, int64_t pitch, int to, uint8_t *out, double *error)
{
    ck_sums sums;
    memset(&sums, 0, sizeof sums);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t at = 0, block = 0; at < columns; block++) {
            const int64_t end = (block + 1) * width - skip < columns ? (block + 1) * width - skip : columns;
            block_codes(in, kind, r * columns + at, end - at, divisors[r * pitch + block], to, out + r * columns + at,
                        &sums);
            at = end;
        }
    uint32_t most = 0;
    error[1] = error[2] = 0;
    for (int k = 0; k < PER * SUMS; k++) {
        most = most > sums.most[k] ? most : sums.most[k];
        error[1] += sums.far[k / PER][k % PER];
        error[2] += sums.of[k / PER][k % PER];
    }
    error[0] = (double)float_of(most);
}

/* The codes of (rows, columns) values, a byte each. The first column is number `skip` of its block; each row of
   divisors lies `pitch` behind the one before. error: the largest distance, the sum of their squares, of the values'. */
API void NAMED(ck_codes)(const void *in, int kind, int64_t rows, int64_t columns, int64_t skip, int64_t width,
                         const float *divisors, int64_t pitch, int to, uint8_t *out, double *error)
{
#define TO(code)                                                                                                       \
    if (to == code && kind == BF16)                                                                                    \
        all_codes(in, BF16, rows, columns, skip, width, divisors, pitch, code, out, error);                            \
    else if (to == code)                                                                                               \
    all_codes(in, F32, rows, columns, skip, width, divisors, pitch, code, out, error)
    TO(E4M3);
    TO(I8);
    TO(I4);
    TO(E2M1);
#undef TO
}

/* -- GGUF's types of blocks: 32 elements, the steps of gguf's quants.py (ckpt_tool/quantised/codecs/gguf_blocks.py) -------------- */

enum { BLOCK = 32 };

/* The fp16 nearest to a finite number, ties to even. */
INLINE uint16_t half_of(float value)
{
    const uint32_t bits = bits_of(value), size = bits & 0x7FFFFFFF;
    uint32_t half = 0x7C00;
    if (size < 0x38800000) /* below 2^-14 steps are those of fp32 beside 1/2 */
        half = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    else if (size < 0x47800000)
        half = (size - (112u << 23) + 0xFFF + (size >> 13 & 1)) >> 13;
    return (uint16_t)(half | bits >> 31 << 15);
}

/* One block. Returns 1 where it holds what gguf's steps make nothing certain of: no finite numbers, scales whose
   reciprocals are none, zeros of both signs as the least value, a logarithm that may be rounded up. */
INLINE int gguf_block(const float *values, int to, uint8_t *out)
{
    const int based = to == Q4_1 || to == Q5_1, bits = to == Q5_0 || to == Q5_1 ? 5 : 4;
    uint32_t top = 0, codes[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t size = bits_of(values[i]) & 0x7FFFFFFF;
        top = top > size ? top : size;
    }
    if (top >= 0x7F800000)
        return 1;
    if (to == MXFP4) {
        if (top && (top < 4u << 23 || (top & 0x7FFFFF) > 0x7FFF00))
            return 1;
        const uint32_t power = top ? (top >> 23) - 2 : 0;
        const float inverse = top ? float_of((255 - power) << 23) : 0;
        for (int i = 0; i < BLOCK; i++) {
            const float size = float_of(bits_of(values[i]) & 0x7FFFFFFF) * inverse;
            const uint32_t code = (size > 0.5f) + (size > 1.5f) + (size > 2.5f) + (size > 3.5f) + (size > 5.0f) +
                                  (size > 7.0f) + (size > 10.0f);
            codes[i] = code | (code ? bits_of(values[i]) >> 31 << 3 : 0);
        }
        *out++ = (uint8_t)power;
    } else {
        float scale, least = 0;
        if (based) {
            float most = least = values[0];
            uint32_t signs = 0;
            for (int i = 0; i < BLOCK; i++) {
                least = values[i] < least ? values[i] : least;
                most = values[i] > most ? values[i] : most;
                signs |= bits_of(values[i]);
            }
            if (least == 0 && signs >> 31)
                return 1;
            scale = (most - least) / (to == Q4_1 ? 15.0f : 31.0f);
        } else if (to == Q8_0) {
            scale = float_of(top) / 127.0f;
        } else {
            int first = BLOCK;
            for (int i = 0; i < BLOCK; i++) {
                const int here = (bits_of(values[i]) & 0x7FFFFFFF) == top ? i : BLOCK;
                first = first < here ? first : here;
            }
            scale = values[first] / (to == Q4_0 ? -8.0f : -16.0f);
        }
        const uint32_t size = bits_of(scale) & 0x7FFFFFFF;
        if (size && (size < 27u << 23 || size > 227u << 23)) /* 2^-100, 2^100 */
            return 1;
        const float inverse = size ? 1.0f / scale : 0.0f;
        const uint16_t parts[2] = {half_of(scale), half_of(least)};
        memcpy(out, parts, based ? 4 : 2);
        out += based ? 4 : 2;
        if (to == Q8_0) { /* half away from zero */
            for (int i = 0; i < BLOCK; i++) {
                const float ratio = values[i] * inverse;
                const int32_t whole = (int32_t)ratio;
                const float rest = ratio - (float)whole;
                codes[i] = (uint32_t)(whole + (rest >= 0.5f) - (rest <= -0.5f));
            }
            for (int i = 0; i < BLOCK; i++)
                out[i] = (uint8_t)codes[i];
            return 0;
        }
        const float add = based ? 0.5f : bits == 4 ? 8.5f : 16.5f;
        const int32_t last = (1 << bits) - 1;
        for (int i = 0; i < BLOCK; i++) {
            const int32_t code = (int32_t)((based ? values[i] - least : values[i]) * inverse + add);
            codes[i] = (uint32_t)(code < last ? code : last);
        }
        if (bits == 5) {
            uint32_t fifth = 0;
            for (int i = 0; i < BLOCK; i++)
                fifth |= codes[i] >> 4 << i;
            memcpy(out, &fifth, 4);
            out += 4;
        }
    }
    for (int i = 0; i < BLOCK / 2; i++)
        out[i] = (uint8_t)((codes[i] & 15) | codes[i + BLOCK / 2] << 4);
    return 0;
}

INLINE int gguf_blocks(const void *in, int kind, int64_t blocks, int to, int nbytes, uint8_t *out)
{
    int odd = 0;
    for (int64_t at = 0; at < blocks; at += CHUNK / BLOCK) {
        const int few = blocks - at < CHUNK / BLOCK ? (int)(blocks - at) : CHUNK / BLOCK;
        float values[CHUNK];
        widen(in, kind, at * BLOCK, few * BLOCK, values);
        for (int b = 0; b < few; b++)
            odd |= gguf_block(values + b * BLOCK, to, out + (at + b) * nbytes);
    }
    return odd;
}

/* Blocks of a type, one behind the other. Returns 1 where one of them is not known here, and `out` is void. */
API int NAMED(ck_gguf)(const void *in, int kind, int64_t blocks, int to, uint8_t *out)
{
#define TO(type, nbytes)                                                                                               \
    if (to == type)                                                                                                    \
    return kind == BF16 ? gguf_blocks(in, BF16, blocks, type, nbytes, out)                                             \
                        : gguf_blocks(in, F32, blocks, type, nbytes, out)
    TO(Q4_0, 18);
    TO(Q4_1, 20);
    TO(Q5_0, 22);
    TO(Q5_1, 24);
    TO(Q8_0, 34);
    TO(MXFP4, 17);
#undef TO
    return 1;
}

/* -- transposes: tiles of vectors, interleaved until rows are columns --------------------------------------------- */

#if defined(__clang__) || __GNUC__ >= 12
#define PICK(kind, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(kind, a, b, ...) __builtin_shuffle(a, b, (kind){__VA_ARGS__})
#endif

typedef uint8_t v1 __attribute__((vector_size(16)));
typedef uint16_t v2 __attribute__((vector_size(16)));
typedef uint32_t v4 __attribute__((vector_size(16)));
typedef uint64_t v8 __attribute__((vector_size(16)));

#define LOW1(a, b) PICK(v1, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH1(a, b) PICK(v1, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LOW2(a, b) PICK(v2, a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH2(a, b) PICK(v2, a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW4(a, b) PICK(v4, a, b, 0, 4, 1, 5)
#define HIGH4(a, b) PICK(v4, a, b, 2, 6, 3, 7)
#define LOW8(a, b) PICK(v8, a, b, 0, 2)
#define HIGH8(a, b) PICK(v8, a, b, 1, 3)

/* turn_S(in, pitch_in, out, pitch_out, rows, columns): out[c][r] = in[r][c] of items of S bytes, pitches in bytes.
   A tile is N = 16 / S vectors of N items. Blocks of 4 by 4 tiles read and fill whole cache lines; the lines of the block
   below are asked for meanwhile: both sides lie far apart, where the processor sees no pattern. */
#define TURN(S, ROUNDS)                                                                                                \
    INLINE void tile_##S(const char *in, int64_t pitch_in, char *out, int64_t pitch_out)                               \
    {                                                                                                                  \
        enum { N = 16 / S };                                                                                           \
        v##S a[N], b[N];                                                                                               \
        _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) memcpy(&a[i], in + i * pitch_in, 16);                     \
        _Pragma("GCC unroll 4") for (int round = 0; round < ROUNDS; round++)                                           \
        {                                                                                                              \
            _Pragma("GCC unroll 8") for (int i = 0; i < N / 2; i++)                                                    \
            {                                                                                                          \
                b[2 * i] = LOW##S(a[i], a[i + N / 2]);                                                                 \
                b[2 * i + 1] = HIGH##S(a[i], a[i + N / 2]);                                                            \
            }                                                                                                          \
            _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) a[i] = b[i];                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) memcpy(out + i * pitch_out, &a[i], 16);                   \
    }                                                                                                                  \
    static void turn_##S(const char *in, int64_t pitch_in, char *out, int64_t pitch_out, int64_t rows,                 \
                         int64_t columns)                                                                              \
    {                                                                                                                  \
        enum { N = 16 / S };                                                                                           \
        const int64_t even_rows = rows / N * N, even_columns = columns / N * N;                                        \
        for (int64_t d = 0; d < even_columns; d += 4 * N)                                                              \
            for (int64_t r = 0; r < even_rows; r += 4 * N) {                                                           \
                const int64_t bottom = r + 4 * N < even_rows ? r + 4 * N : even_rows;                                  \
                for (int64_t i = bottom; i < bottom + 4 * N && i < even_rows; i++)                                     \
                    __builtin_prefetch(in + i * pitch_in + d * S, 0);                                                  \
                for (int64_t c = d; c < even_columns && c < d + 4 * N; c += N) {                                       \
                    for (int64_t i = c; i < c + N && bottom < even_rows; i++)                                          \
                        __builtin_prefetch(out + i * pitch_out + bottom * S, 1);                                       \
                    for (int64_t k = r; k < bottom; k += N)                                                            \
                        tile_##S(in + k * pitch_in + c * S, pitch_in, out + c * pitch_out + k * S, pitch_out);         \
                }                                                                                                      \
            }                                                                                                          \
        for (int64_t r = 0; r < rows; r++)                                                                             \
            for (int64_t c = r < even_rows ? even_columns : 0; c < columns; c++)                                       \
                memcpy(out + c * pitch_out + r * S, in + r * pitch_in + c * S, S);                                     \
    }

TURN(1, 4)
TURN(2, 3)
TURN(4, 2)
TURN(8, 1)

/* Returns 1 where items have a size that it does not know. */
API int NAMED(ck_turn)(int item, const char *in, int64_t pitch_in, char *out, int64_t pitch_out, int64_t rows,
                       int64_t columns)
{
    switch (item) {
    case 1: turn_1(in, pitch_in, out, pitch_out, rows, columns); return 0;
    case 2: turn_2(in, pitch_in, out, pitch_out, rows, columns); return 0;
    case 4: turn_4(in, pitch_in, out, pitch_out, rows, columns); return 0;
    case 8: turn_8(in, pitch_in, out, pitch_out, rows, columns); return 0;
    }
    return 1;
}
