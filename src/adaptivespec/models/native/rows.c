// What happens to a row between two linears: normalisation, the gate, rotation and the way into the cache. One rounding each.

#include <math.h>

#include "common.h"

enum { WORTH_A_THREAD = 1 << 14 };  // values; fewer are done before another core has begun

static inline void norm_row(const bf16 *x, const bf16 *weight, float eps, bf16 *y, long width) {
    __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (long i = 0; i < width; i += 2 * LANES)
        for (int v = 0; v < 2; v++) {
            const __m512 part = widen_masked(x + i + LANES * v, lanes(width - i - LANES * v));
            squares[v] = _mm512_fmadd_ps(part, part, squares[v]);
        }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(_mm512_add_ps(squares[0], squares[1])) / width + eps));
    for (long i = 0; i < width; i += LANES) {
        const __mmask16 mask = lanes(width - i);
        narrow_masked(y + i, _mm512_mul_ps(_mm512_mul_ps(widen_masked(x + i, mask), scale), widen_masked(weight + i, mask)), mask);
    }
}

// y = x / sqrt(mean(x * x) + eps) * weight; x [rows, width] with a stride, weight [width], y [rows, width].
void rms_norm(const bf16 *x, long x_stride, const bf16 *weight, float eps, bf16 *y, long rows, long width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width >= WORTH_A_THREAD)
    for (long m = 0; m < rows; m++) norm_row(x + m * x_stride, weight, eps, y + m * width, width);
}

// y = silu(gate) * up; both [rows, width] side by side in gate_up [rows, 2 width], y [rows, width].
void silu_multiply(const bf16 *gate_up, bf16 *y, long rows, long width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width >= WORTH_A_THREAD)
    for (long m = 0; m < rows; m++)
        for (long i = 0; i < width; i += LANES) {
            const __mmask16 mask = lanes(width - i);
            const bf16 *at = gate_up + 2 * m * width + i;
            const __m512 gate = widen_masked(at, mask);
            const __m512 divisor = _mm512_add_ps(_mm512_set1_ps(1.0f), exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
            narrow_masked(y + m * width + i, _mm512_mul_ps(_mm512_div_ps(gate, divisor), widen_masked(at + width, mask)), mask);
        }
}

// x cos + roll(x) sin, with the sign in the table (rotary.py).
static inline void rotate_head(const bf16 *x, const bf16 *cosine, const bf16 *sine, bf16 *y, long dim) {
    const long half = dim / 2;
    for (long i = 0; i < half; i += LANES) {
        const __m512 low = widen(x + i), high = widen(x + half + i);
        narrow(y + i, _mm512_fmadd_ps(high, widen(sine + i), _mm512_mul_ps(low, widen(cosine + i))));
        narrow(y + half + i, _mm512_fmadd_ps(low, widen(sine + half + i), _mm512_mul_ps(high, widen(cosine + half + i))));
    }
}

// Rotate queries in place and keys into a layer's cache, copy values there; queries and keys are normalised before if weights are given.
// qkv [M, heads + 2 kv_heads, dim].
void rotate(const view *v, long layer, bf16 *qkv, const bf16 *q_norm, const bf16 *k_norm, float eps, long heads) {
    const long dim = v->dim, keys = heads + v->kv_heads, all = keys + v->kv_heads;
    const bf16 *cosine = v->cosine, *sine = v->sine;
    for (const request *r = v->requests; r < v->requests + v->batch; r++)
        for (long i = 0; i < r->count; i++, cosine += v->angle_stride, sine += v->angle_stride) {
            bf16 *row = v->cache + layer * v->layer_stride + r->slot * v->slot_stride + (r->start + i) * dim;
            for (long h = 0; h < all; h++, qkv += dim) {
                bf16 *place = h < heads ? qkv : row + (h - heads) * v->head_stride;
                const bf16 *norm = h < heads ? q_norm : h < keys ? k_norm : 0;
                if (norm) norm_row(qkv, norm, eps, qkv, dim);
                if (h < keys)
                    rotate_head(qkv, cosine, sine, place, dim);
                else
                    memcpy(place, qkv, dim * sizeof(bf16));
            }
        }
}
