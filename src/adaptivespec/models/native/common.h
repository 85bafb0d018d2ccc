// What the kernels share: bf16 in memory, fp32 in registers of 16 lanes, and the shape of a block of new rows.

#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

enum { LANES = 16 };

// Where the rows of one request go in a cache, as in kv_cache.py's Block.
typedef struct {
    long slot, base, start, count;
} request;

// A block of M new rows and the cache they go to: the same for all layers of a forward. Fields as in layers.py.
typedef struct {
    bf16 *cache;               // [layer, slot, 2 kv_heads, row, dim], keys before values; strides in values
    const request *requests;   // [batch]
    const uint8_t *visible;    // [b, i, c]: whether row i of request b sees cache row base + c; null: it sees all up to start + i
    const bf16 *cosine, *sine;  // [M, dim], with a stride
    float *scratch;            // attention_scratch values
    bf16 *buffer;              // for the values between the linears of a layer
    long layer_stride, slot_stride, head_stride, kv_heads, dim, batch, rows, visible_request, visible_row, width, end, angle_stride;
    int threads;
} view;

static inline __m512 widen_masked(const bf16 *from, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

static inline __m512 widen(const bf16 *from) { return widen_masked(from, 0xffff); }

static inline void narrow_masked(bf16 *to, __m512 value, __mmask16 mask) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

static inline void narrow(bf16 *to, __m512 value) { narrow_masked(to, value, 0xffff); }

// Lanes of the vector that begins `left` values before the end.
static inline __mmask16 lanes(long left) { return left >= LANES ? 0xffff : left > 0 ? (1u << left) - 1 : 0; }

// e^x (0 or infinite beyond 104) within 2 units of the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes' coefficients).
static inline __m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(104.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));  // in this order a NaN passes
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

void linear(const bf16 *x, long x_stride, const bf16 *weight, const bf16 *bias, const bf16 *residual, long residual_stride, bf16 *y,
            long rows, long outputs, long inner, int threads);
void rms_norm(const bf16 *x, long x_stride, const bf16 *weight, float eps, bf16 *y, long rows, long width, int threads);
void silu_multiply(const bf16 *gate_up, bf16 *y, long rows, long width, int threads);
void rotate(const view *v, long layer, bf16 *qkv, const bf16 *q_norm, const bf16 *k_norm, float eps, long heads);
void attend(const view *v, long layer, const bf16 *qkv, bf16 *out, long heads);
