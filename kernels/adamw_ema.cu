// adamw_ema: one step of AdamW and of the moving average over flat buffers, in one pass; and the swap of weights and average.
//
// For each of `count` elements, all in fp32, each operation rounded by itself (NumPy with np.float32 scalars gives the same bits):
//     g = gradient * scale
//     exp_avg = exp_avg * beta1 + g * beta1_rest                  exp_avg_sq = exp_avg_sq * beta2 + (g * g) * beta2_rest
//     master = master * decay - (exp_avg / correction1) / (sqrt(exp_avg_sq / correction2) + eps) * rate
//     ema = ema * average + master * average_rest                 parameter = master, rounded to nearest even where it is BF16
// with `..._rest` 1 - that, `correction` 1 - beta ** step, `decay` 1 - rate * weight_decay: computed in fp64, rounded once.
// It is the formula of `ckpt_tool/harness/optimizer.py`. No product is fused with a sum: the build says -fmad=false.
// swap: master, ema = ema, master; parameter = master.
// Map: grid-stride, 4 elements a thread where all buffers lie on 16 bytes (those of 2-byte elements on 8), else and for the last
// few one. Any count; addresses are multiples of the element's size. `ema` and `parameter` may be 0: there is none. Each element
// is read and written by one thread, in place.
// Bound: memory, 36 bytes an element with fp32 gradients (34 with BF16), 8 less without an average, 2 or 4 more with a parameter;
// swap 16 and the parameter.
#include "floats.h"

#include <math.h>

namespace {

constexpr int THREADS = 256;

struct Buffers { // addresses; kinds: CK_F32 or CK_BF16
    uint64_t gradient, master, exp_avg, exp_avg_sq, ema, parameter;
    uint32_t gradient_kind, parameter_kind;
};

template <int N> struct alignas(4 * N) Floats {
    float v[N];
};
template <int N> struct alignas(2 * N) Halves {
    uint16_t v[N];
};

template <int N> CK_DEVICE Floats<N> own(uint64_t address, uint64_t k) { return ck_load_own<Floats<N>>(address + k * 4); }

template <int N> CK_DEVICE Floats<N> gradient_at(const Buffers& to, uint64_t k) {
    if (to.gradient_kind == CK_F32) return ck_load<Floats<N>>(to.gradient + k * 4);
    const Halves<N> bits = ck_load<Halves<N>>(to.gradient + k * 2);
    Floats<N> out;
    CK_UNROLL
    for (int i = 0; i < N; ++i) out.v[i] = ck_float(uint32_t(bits.v[i]) << 16);
    return out;
}

template <int N> CK_DEVICE void write_parameter(const Buffers& to, uint64_t k, const Floats<N>& master) {
    if (!to.parameter) return;
    if (to.parameter_kind == CK_F32) return ck_store(to.parameter + k * 4, master);
    Halves<N> out;
    uint32_t lost = 0;
    CK_UNROLL
    for (int i = 0; i < N; ++i) out.v[i] = ck_bf16().narrow(ck_bits(master.v[i]), lost);
    ck_store(to.parameter + k * 2, out);
}

// Elements [k, k + N).
template <int N> CK_DEVICE void step(const Buffers& to, const ck_adamw& c, uint64_t k) {
    const Floats<N> gradient = gradient_at<N>(to, k);
    Floats<N> m = own<N>(to.exp_avg, k), v = own<N>(to.exp_avg_sq, k), p = own<N>(to.master, k), e = {};
    if (to.ema) e = own<N>(to.ema, k);
    CK_UNROLL
    for (int i = 0; i < N; ++i) {
        const float g = gradient.v[i] * c.scale;
        m.v[i] = m.v[i] * c.beta1 + g * c.beta1_rest;
        v.v[i] = v.v[i] * c.beta2 + g * g * c.beta2_rest;
        const float mean = m.v[i] / c.correction1, spread = sqrtf(v.v[i] / c.correction2) + c.eps;
        p.v[i] = p.v[i] * c.decay - mean / spread * c.rate;
        e.v[i] = e.v[i] * c.average + p.v[i] * c.average_rest;
    }
    ck_store(to.exp_avg + k * 4, m);
    ck_store(to.exp_avg_sq + k * 4, v);
    ck_store(to.master + k * 4, p);
    if (to.ema) ck_store(to.ema + k * 4, e);
    write_parameter<N>(to, k, p);
}

template <int N> CK_DEVICE void exchange(const Buffers& to, uint64_t k) {
    const Floats<N> p = own<N>(to.master, k), e = own<N>(to.ema, k);
    ck_store(to.master + k * 4, e);
    ck_store(to.ema + k * 4, p);
    write_parameter<N>(to, k, e);
}

// `vectors` times 4 elements, then those up to `count`.
CK_KERNEL(THREADS) void adamw_ema(Buffers to, ck_adamw constants, uint64_t count, uint64_t vectors) {
    const uint64_t thread = uint64_t(ck_bid()) * ck_nt() + ck_tid(), all = uint64_t(ck_nb()) * ck_nt();
    for (uint64_t k = thread; k < vectors; k += all) step<4>(to, constants, k * 4);
    for (uint64_t k = vectors * 4 + thread; k < count; k += all) step<1>(to, constants, k);
}

CK_KERNEL(THREADS) void ema_swap(Buffers to, uint64_t count, uint64_t vectors) {
    const uint64_t thread = uint64_t(ck_bid()) * ck_nt() + ck_tid(), all = uint64_t(ck_nb()) * ck_nt();
    for (uint64_t k = thread; k < vectors; k += all) exchange<4>(to, k * 4);
    for (uint64_t k = vectors * 4 + thread; k < count; k += all) exchange<1>(to, k);
}

// log2 of what the elements of all buffers lie on, counted in elements; 0 for single elements, negative where not even that.
int alignment(const Buffers& to) {
    const uint64_t wide = to.master | to.exp_avg | to.exp_avg_sq | to.ema | (to.parameter_kind == CK_F32 ? to.parameter : 0) |
                          (to.gradient_kind == CK_F32 ? to.gradient : 0);
    const uint64_t narrow =
        (to.parameter_kind == CK_F32 ? 0 : to.parameter) | (to.gradient_kind == CK_F32 ? 0 : to.gradient);
    return wide % 4 || narrow % 2 ? -1 : wide % 16 || narrow % 8 ? 0 : 2;
}
bool known(uint32_t kind) { return kind == CK_F32 || kind == CK_BF16; }

} // namespace

CK_API int ck_adamw_ema(const ck_adamw* constants, uint64_t count, uint64_t gradient, uint32_t gradient_kind, uint64_t master,
                        uint64_t exp_avg, uint64_t exp_avg_sq, uint64_t ema, uint64_t parameter, uint32_t parameter_kind,
                        int blocks, int threads, void* stream) {
    if (count == 0) return cudaSuccess;
    const Buffers to = {gradient, master, exp_avg, exp_avg_sq, ema, parameter, gradient_kind, parameter_kind};
    const int aligned = alignment(to);
    if (threads < 0 || threads % 32 || threads > THREADS || aligned < 0 || !known(gradient_kind) || !known(parameter_kind))
        return cudaErrorInvalidValue;
    if (threads == 0) threads = THREADS;
    const uint64_t vectors = aligned == 2 ? count / 4 : 0, work = vectors ? vectors : count;
    blocks = ck_fill_grid(blocks, CK_EVERY, (work + threads - 1) / threads);
    if (blocks == 0) return ck_last_error();
    return CK_LAUNCH(adamw_ema, blocks, threads, stream, to, *constants, count, vectors);
}

CK_API int ck_ema_swap(uint64_t count, uint64_t master, uint64_t ema, uint64_t parameter, uint32_t parameter_kind, int blocks,
                       int threads, void* stream) {
    if (count == 0) return cudaSuccess;
    const Buffers to = {0, master, 0, 0, ema, parameter, CK_F32, parameter_kind};
    const int aligned = alignment(to);
    if (threads < 0 || threads % 32 || threads > THREADS || aligned < 0 || !known(parameter_kind)) return cudaErrorInvalidValue;
    if (threads == 0) threads = THREADS;
    const uint64_t vectors = aligned == 2 ? count / 4 : 0, work = vectors ? vectors : count;
    blocks = ck_fill_grid(blocks, 48, (work + threads - 1) / threads);
    if (blocks == 0) return ck_last_error();
    return CK_LAUNCH(ema_swap, blocks, threads, stream, to, count, vectors);
}
