// y = x W^T + bias + residual in bf16, summed in fp32, for CPUs with AVX512-BF16.
//
// The weight is read once, front to back, at the speed of memory: for a handful of rows nothing else costs time. Every output is
// one chain of sums over the inner dimension, in the same order whatever rows come along, so that a row's bits never depend on them.

#include "common.h"

enum {
    VECTORS = 3,              // registers side by side
    PANEL = LANES * VECTORS,  // as in ops.py
    ROWS = 9,                 // rows whose sums fit in the registers beside three of weights
    AHEAD = 4096,             // bytes
};

int supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}

// `rows` is known where this is inlined, so the sums stay in registers.
static inline __attribute__((always_inline)) void panel_rows(
    const int rows, const bf16 *x, long x_stride, const bf16 *weight, long pairs, const __m512 *bias,
    const bf16 *residual, long residual_stride, bf16 *y, long y_stride, const __mmask16 *mask) {
    __m512 sum[ROWS][VECTORS];
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < VECTORS; v++) sum[m][v] = _mm512_setzero_ps();
    for (long j = 0; j < pairs; j++, weight += 2 * PANEL) {
        __m512bh w[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            w[v] = (__m512bh)_mm512_loadu_si512(weight + 2 * LANES * v);
            _mm_prefetch((const char *)(weight + 2 * LANES * v) + AHEAD, _MM_HINT_T0);
        }
        for (int m = 0; m < rows; m++) {
            int32_t pair;
            memcpy(&pair, x + m * x_stride + 2 * j, sizeof pair);
            const __m512bh xs = (__m512bh)_mm512_set1_epi32(pair);
            for (int v = 0; v < VECTORS; v++) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], xs, w[v]);
        }
    }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < VECTORS; v++) {
            __m512 out = _mm512_add_ps(sum[m][v], bias[v]);
            if (residual) out = _mm512_add_ps(out, widen_masked(residual + m * residual_stride + LANES * v, mask[v]));
            narrow_masked(y + m * y_stride + LANES * v, out, mask[v]);
        }
}

// x [rows, inner], weight [ceil(outputs / PANEL), inner / 2, PANEL, 2] (zeros beyond `outputs`), bias [outputs] or null, residual and
// y [rows, outputs] (residual may be null); strides in elements.
void linear(const bf16 *x, long x_stride, const bf16 *weight, const bf16 *bias, const bf16 *residual, long residual_stride,
            bf16 *y, long rows, long outputs, long inner, int threads) {
    const long panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long p = 0; p < panels; p++) {
        const long first = p * PANEL;
        __mmask16 mask[VECTORS];
        __m512 biases[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            mask[v] = lanes(outputs - first - LANES * v);
            biases[v] = bias ? widen_masked(bias + first + LANES * v, mask[v]) : _mm512_setzero_ps();
        }
        for (long m = 0; m < rows; m += ROWS) {
#define RUN(n) panel_rows(n, x + m * x_stride, x_stride, weight + p * inner * PANEL, inner / 2, biases, \
                          residual ? residual + m * residual_stride + first : 0, residual_stride, y + m * outputs + first, outputs, mask)
            switch (rows - m) {
                case 1: RUN(1); break;
                case 2: RUN(2); break;
                case 3: RUN(3); break;
                case 4: RUN(4); break;
                case 5: RUN(5); break;
                case 6: RUN(6); break;
                case 7: RUN(7); break;
                case 8: RUN(8); break;
                default: RUN(ROWS);
            }
        }
    }
}
