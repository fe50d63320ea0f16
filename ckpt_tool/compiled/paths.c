/* Which of the paths that this library holds the processor at hand can run, and what the library was built from.

   A path is blocks.c compiled for one level of the processor: baseline (x86-64-v2, or NEON), avx2, avx512. The choice is
   a question asked once (`cpuid`), not an ifunc: musl and macOS have none. This file is compiled for any processor. */

#include <string.h>

#define API __attribute__((visibility("default")))

#if defined(__x86_64__)
static int has_baseline(void)
{
    return __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
}

static int has_avx2(void)
{
    return has_baseline() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
#else
static int has_baseline(void) { return 1; }
#endif

/* The names of the paths, best first, a blank between two; "" where this processor can run none. */
API const char *ck_paths(void)
{
    static char names[32];
    char found[32] = "";
#if defined(__x86_64__)
    __builtin_cpu_init();
#if defined(CK_HAS_AVX512)
    if (has_avx512())
        strcat(found, "avx512 ");
#endif
#if defined(CK_HAS_AVX2)
    if (has_avx2())
        strcat(found, "avx2 ");
#endif
#endif
    if (has_baseline())
        strcat(found, "baseline");
    memcpy(names, found, sizeof names); /* the same bytes from every thread */
    return names;
}

/* SHA-256 of the sources and of the script that built them (`build.source_digest`). */
API const char *ck_built_from(void) { return CK_BUILT_FROM; }

API const char *ck_compiler(void) { return CK_COMPILER; }
