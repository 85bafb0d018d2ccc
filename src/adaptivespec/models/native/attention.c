// Attention of a block of new rows over a cache. A row's bits depend on the keys it sees, in the order of their positions, and on nothing
// else: not on the other rows of its tree, the siblings between its ancestors, or the batch. So a verified row is a decoded row.

#include <math.h>
#include <omp.h>

#include "common.h"

enum {
    QUERIES = 8,   // scored together: as many chains of sums as hide the latency of one
    SCORED = 64,   // most heads that may share a key head
    USUAL = 32,    // queries of one piece of work: their scores stay in the nearest cache
    WIDTH = 32,    // values of a head that are summed together
};

// to[pair][key] = from[key][pair]: 16 keys of 16 pairs of bf16 each.
static inline void transpose(const bf16 *const *from, long offset, int32_t *to) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from[i] + offset);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            b[8 * j + i] = _mm512_shuffle_i32x4(a[8 * j + i], a[8 * j + 4 + i], 0x88);
            b[8 * j + 4 + i] = _mm512_shuffle_i32x4(a[8 * j + i], a[8 * j + 4 + i], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        _mm512_storeu_si512(to + LANES * i, _mm512_shuffle_i32x4(b[i], b[8 + i], 0x88));
        _mm512_storeu_si512(to + LANES * (8 + i), _mm512_shuffle_i32x4(b[i], b[8 + i], 0xdd));
    }
}

// Scores of `count` queries with 16 keys. `count` is known where this is inlined.
static inline __attribute__((always_inline)) void score(
    const int count, const bf16 *const *queries, const int32_t *keys, long pairs, __m512 scale, float *const *scores, long at) {
    __m512 sum[QUERIES];
    for (int q = 0; q < count; q++) sum[q] = _mm512_setzero_ps();
    for (long j = 0; j < pairs; j++) {
        const __m512bh key = (__m512bh)_mm512_loadu_si512(keys + LANES * j);
        for (int q = 0; q < count; q++) {
            int32_t pair;
            memcpy(&pair, queries[q] + 2 * j, sizeof pair);
            sum[q] = _mm512_dpbf16_ps(sum[q], (__m512bh)_mm512_set1_epi32(pair), key);
        }
    }
    for (int q = 0; q < count; q++) _mm512_storeu_ps(scores[q] + at, _mm512_mul_ps(sum[q], scale));
}

// Scores -> unnormalised probabilities in place, by position; returns their sum. `length` scores, with room for 15 more.
static inline float exponentials(float *scores, long length) {
    for (long i = length; i % LANES; i++) scores[i] = -INFINITY;
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (long i = 0; i < length; i += LANES) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i));
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (long i = 0; i < length; i += LANES) {
        const __mmask16 mask = lanes(length - i);
        const __m512 p = _mm512_maskz_mov_ps(mask, exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + i), most)));
        sum = _mm512_add_ps(sum, p);
        _mm512_storeu_ps(scores + i, p);
    }
    return _mm512_reduce_add_ps(sum);
}

// out = sum of p v / sum of p for `count` heads of one row that share their values; `seen` holds the cache rows beyond `base`.
static inline __attribute__((always_inline)) void weigh(
    const int count, float *const *p, const float *total, const bf16 *values, long base, const int32_t *seen, long length, long dim,
    bf16 *const *out) {
    for (long d = 0; d < dim; d += WIDTH) {
        __m512 sum[QUERIES][2];
        for (int q = 0; q < count; q++) sum[q][0] = sum[q][1] = _mm512_setzero_ps();
        for (long j = 0; j < length; j++) {
            const bf16 *value = values + (j < base ? j : seen[j - base]) * dim + d;
            const __m512 low = widen(value), high = widen(value + LANES);
            for (int q = 0; q < count; q++) {
                const __m512 weight = _mm512_set1_ps(p[q][j]);
                sum[q][0] = _mm512_fmadd_ps(weight, low, sum[q][0]);
                sum[q][1] = _mm512_fmadd_ps(weight, high, sum[q][1]);
            }
        }
        for (int q = 0; q < count; q++) {
            const __m512 scale = _mm512_set1_ps(1.0f / total[q]);
            narrow(out[q] + d, _mm512_mul_ps(sum[q][0], scale));
            narrow(out[q] + d + LANES, _mm512_mul_ps(sum[q][1], scale));
        }
    }
}

#define FOR_COUNT(n, CALL) \
    switch (n) { \
        case 1: CALL(1); break; \
        case 2: CALL(2); break; \
        case 3: CALL(3); break; \
        case 4: CALL(4); break; \
        case 5: CALL(5); break; \
        case 6: CALL(6); break; \
        case 7: CALL(7); break; \
        default: CALL(QUERIES); \
    }

// Queries of one piece of work: as many rows as are usual, but at least one.
static long queries_of(long group) { return group > USUAL ? group : USUAL; }

// Floats of scratch for one thread.
static long scratch_of(long end, long width, long dim, long group) {
    return queries_of(group) * (end + LANES) + LANES * dim / 2 + width;
}

// Rows `from` to `to` of request `b`, whose first row is row `first` of all, with one key head.
static void attend_piece(const view *v, long layer, const bf16 *qkv, bf16 *all_out, long heads, long b, long first, long from, long to,
                         long kv_head, float *scratch) {
    const request *r = v->requests + b;
    const long dim = v->dim, group = heads / v->kv_heads, count = (to - from) * group, room = v->end + LANES;
    const bf16 *keys = v->cache + layer * v->layer_stride + r->slot * v->slot_stride + kv_head * v->head_stride;
    const bf16 *values = keys + v->kv_heads * v->head_stride;
    const uint8_t *visible = v->visible ? v->visible + b * v->visible_request : 0;
    const long written = r->start + r->count - r->base, width = v->width < written ? v->width : written;  // none sees beyond
    int32_t *turned = (int32_t *)(scratch + queries_of(group) * room), *seen = turned + LANES * dim / 2;
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(dim));
    const bf16 *queries[SCORED];
    float *scores[SCORED];
    for (long i = 0; i < count; i++) {
        queries[i] = qkv + ((first + from + i / group) * (heads + 2 * v->kv_heads) + kv_head * group + i % group) * dim;
        scores[i] = scratch + i * room;
    }
    long scored = visible ? r->base : r->start + to;
    for (long row = from; visible && row < to; row++) {
        long last = width;
        while (last > 0 && !visible[row * v->visible_row + last - 1]) last--;
        if (r->base + last > scored) scored = r->base + last;
    }
    for (long at = 0; at < scored; at += LANES) {
        const bf16 *sixteen[LANES];  // the last keys again where there are fewer
        for (long i = 0; i < LANES; i++) sixteen[i] = keys + (at + i < scored ? at + i : scored - 1) * dim;
        for (long d = 0; d < dim; d += 2 * LANES) transpose(sixteen, d, turned + LANES * d / 2);
        for (long i = 0; i < count; i += QUERIES) {
#define SCORE(n) score(n, queries + i, turned, dim / 2, scale, scores + i, at)
            FOR_COUNT(count - i, SCORE)
        }
    }
    for (long row = from; row < to; row++) {
        float *const *own = scores + (row - from) * group;
        float total[SCORED];
        bf16 *out[SCORED];
        long base = r->start + row + 1, length = base;  // without a mask: all up to itself
        if (visible) {
            base = length = r->base;
            for (long i = 0; i < width; i++)
                if (visible[row * v->visible_row + i]) seen[length++ - base] = base + i;
        }
        for (long h = 0; h < group; h++) {
            for (long j = base; j < length; j++) own[h][j] = own[h][seen[j - base]];
            total[h] = exponentials(own[h], length);
            out[h] = all_out + ((first + row) * heads + kv_head * group + h) * dim;
        }
        for (long h = 0; h < group; h += QUERIES) {
#define WEIGH(n) weigh(n, own + h, total + h, values, base, seen, length, dim, out + h)
            FOR_COUNT(group - h, WEIGH)
        }
    }
}

// Floats of a view's scratch.
long attention_scratch(long end, long width, long dim, long group, int threads) { return threads * scratch_of(end, width, dim, group); }

// qkv [M, heads + 2 kv_heads, dim], rotated, its keys and values in the cache -> out [M, heads, dim].
// dim is a multiple of 32 and heads / kv_heads at most 64; every row sees something.
void attend(const view *v, long layer, const bf16 *qkv, bf16 *out, long heads) {
    if (!v->rows) return;
    // Rows that are done together turn their keys once; fewer keep every thread busy.
    const long group = heads / v->kv_heads, most = queries_of(group) / group;
    const long even = (v->rows * v->kv_heads + 2 * v->threads - 1) / (2 * v->threads);
    const long rows = even > most ? most : even < 4 && most >= 4 ? 4 : even;
    long pieces = 0;
    for (long b = 0; b < v->batch; b++) pieces += (v->requests[b].count + rows - 1) / rows * v->kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(v->threads)
    for (long piece = 0; piece < pieces; piece++) {
        long left = piece / v->kv_heads, b = 0, first = 0;
        for (long own; left >= (own = (v->requests[b].count + rows - 1) / rows); left -= own) first += v->requests[b++].count;
        const long from = left * rows, to = from + rows < v->requests[b].count ? from + rows : v->requests[b].count;
        float *scratch = v->scratch + omp_get_thread_num() * scratch_of(v->end, v->width, v->dim, group);
        attend_piece(v, layer, qkv, out, heads, b, first, from, to, piece % v->kv_heads, scratch);
    }
}
