/* What blocks.c and floats.c share: names of their functions, kinds of numbers, lines of fp32 and bf16.

   Both are compiled once for each path (ckpt_tool/compiled/build.py), with -DCK_PATH=avx2 for example: NAMED(ck_turn) is
   then ck_turn_avx2. Without it the names are plain. */

#ifndef CK_ARRAYS_H
#define CK_ARRAYS_H

#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#if defined(CK_PATH)
#define JOINED(name, path) name##_##path
#define SUFFIXED(name, path) JOINED(name, path)
#define NAMED(name) SUFFIXED(name, CK_PATH)
#else
#define NAMED(name) name
#endif
#define INLINE static inline __attribute__((always_inline))

enum { F32 = 0, BF16 = 1 };
enum { CHUNK = 512 }; /* elements that are worked on at a time: they stay in L1 */

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Elements [at, at + n) of a line as fp32. */
INLINE void widen(const void *in, int kind, int64_t at, int n, float *restrict out)
{
    if (kind == F32) {
        memcpy(out, (const float *)in + at, 4 * (size_t)n);
        return;
    }
    const uint16_t *half = (const uint16_t *)in + at;
    for (int i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)half[i] << 16;
        memcpy(out + i, &bits, 4);
    }
}

/* fp32 to elements [at, at + n) of a line, to nearest, ties to even. Returns 1 where one of them is no finite number,
   or becomes none. */
INLINE int narrow(const float *restrict in, int n, void *out, int kind, int64_t at)
{
    uint32_t most = 0;
    if (kind == F32) {
        for (int i = 0; i < n; i++) {
            uint32_t size = bits_of(in[i]) & 0x7FFFFFFF;
            most = most > size ? most : size;
        }
        memcpy((float *)out + at, in, 4 * (size_t)n);
        return most >= 0x7F800000;
    }
    uint16_t *half = (uint16_t *)out + at;
    for (int i = 0; i < n; i++) {
        uint32_t bits = bits_of(in[i]), size = bits & 0x7FFFFFFF;
        most = most > size ? most : size;
        half[i] = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    }
    return most >= 0x7F7F8000; /* 0x7F7F is the largest bf16 */
}

/* Types of GGUF's blocks, in the order of `library.GGUF`. */
enum {
    Q4_0 = 0,
    Q4_1 = 1,
    Q5_0 = 2,
    Q5_1 = 3,
    Q8_0 = 4,
    MXFP4 = 5,
    TQ2_0 = 6,
    IQ4_NL = 7,
    IQ4_XS = 8,
    Q2_K = 9,
    Q3_K = 10,
    Q4_K = 11,
    Q5_K = 12,
    Q6_K = 13,
    TYPES = 14
};

#endif
