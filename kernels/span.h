// 16 bytes from any address, reading nothing outside a span: what digest and compare are fed by.
#pragma once
#include "portable.h"

// The 16 bytes that begin `shift` (1..15) bytes into a.
CK_DEVICE ck_v16 span_shifted(const ck_v16& a, const ck_v16& b, uint32_t shift) {
    const bool two = shift & 8, one = shift & 4;
    const uint32_t bytes = shift & 3;
    const uint32_t t0 = two ? a.z : a.x, t1 = two ? a.w : a.y, t2 = two ? b.x : a.z, t3 = two ? b.y : a.w,
                   t4 = two ? b.z : b.x, t5 = two ? b.w : b.y;
    const uint32_t w0 = one ? t1 : t0, w1 = one ? t2 : t1, w2 = one ? t3 : t2, w3 = one ? t4 : t3, w4 = one ? t5 : t4;
    return {ck_funnel(w0, w1, bytes), ck_funnel(w1, w2, bytes), ck_funnel(w2, w3, bytes), ck_funnel(w3, w4, bytes)};
}

// The bytes [at, at + 16) by loads of 1, 2 and 4 bytes, zeros for those from `end` on.
CK_DEVICE ck_v16 span_pieces(uint64_t at, uint64_t end) {
    uint64_t low = 0, high = 0;
    const uint32_t count = end <= at ? 0 : end - at < 16 ? uint32_t(end - at) : 16;
    for (uint32_t k = 0; k < count;) {
        uint32_t v, size;
        if (!((at + k) & 3) && k + 4 <= count)
            v = ck_load<uint32_t>(at + k), size = 4;
        else if (!((at + k) & 1) && k + 2 <= count)
            v = ck_load<uint16_t>(at + k), size = 2;
        else
            v = ck_load<uint8_t>(at + k), size = 1;
        if (k < 8) low |= uint64_t(v) << (8 * k);
        if (k >= 8)
            high |= uint64_t(v) << (8 * (k - 8));
        else if (k > 4)
            high |= uint64_t(v) >> (8 * (8 - k)); // what hangs over the middle
        k += size;
    }
    return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
}

// The bytes [at, at + 16) of the span [begin, end), zeros for those from `end` on. begin <= at.
CK_DEVICE ck_v16 span_take(uint64_t at, uint64_t begin, uint64_t end) {
    const uint32_t shift = uint32_t(at) & 15;
    const uint64_t base = at - shift;
    if (shift == 0 && at + 16 <= end) return ck_load<ck_v16>(at);
    if (shift && base >= begin && base + 32 <= end) return span_shifted(ck_load_kept(base), ck_load_kept(base + 16), shift);
    return span_pieces(at, end);
}
