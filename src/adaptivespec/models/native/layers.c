// Whole parts of a transformer in one call each: between them, a caller in Python costs as much as a small linear.

#include "common.h"

// Fields as in layers.py; weights packed for linear.c, biases and norms null where a model has none.
typedef struct {
    const bf16 *qkv, *bias, *out, *q_norm, *k_norm;
    long inner, hidden;  // width of its input and its output
    long heads, kv_heads, dim;  // the last two are read by layers.py alone
    float eps;
} attention;

typedef struct {
    const bf16 *gate_up, *down;
    long hidden, inner;
} mlp;

typedef struct {
    attention attention;
    mlp mlp;
    const bf16 *input_norm, *post_norm;
} layer;

// y = residual + attention(x); x [M, inner], residual and y [M, hidden], which may be the same. Writes a layer's cache.
void run_attention(const attention *a, const view *v, long index, const bf16 *x, long x_stride, const bf16 *residual, long residual_stride,
                   bf16 *y) {
    const long all = (a->heads + 2 * v->kv_heads) * v->dim, heads = a->heads * v->dim;
    bf16 *qkv = v->buffer, *out = qkv + v->rows * all;
    linear(x, x_stride, a->qkv, a->bias, 0, 0, qkv, v->rows, all, a->inner, v->threads);
    rotate(v, index, qkv, a->q_norm, a->k_norm, a->eps, a->heads);
    attend(v, index, qkv, out, a->heads);
    linear(out, heads, a->out, 0, residual, residual_stride, y, v->rows, a->hidden, heads, v->threads);
}

// y = residual + mlp(x); all [M, hidden]; y and residual may be the same. The buffer holds 3 M inner values.
void run_mlp(const mlp *m, long rows, const bf16 *x, const bf16 *residual, bf16 *y, bf16 *buffer, int threads) {
    bf16 *gated = buffer + 2 * rows * m->inner;
    linear(x, m->hidden, m->gate_up, 0, 0, 0, buffer, rows, 2 * m->inner, m->hidden, threads);
    silu_multiply(buffer, gated, rows, m->inner, threads);
    linear(gated, m->inner, m->down, 0, residual, m->hidden, y, rows, m->hidden, m->inner, threads);
}

// All layers in place on x [M, hidden]. The inputs of layer taken[i] go to features [M, takes, hidden]; normed [M, hidden] is for what
// lies between.
void run_layers(const layer *layers, long count, const view *v, bf16 *x, bf16 *normed, const long *taken, long takes, bf16 *features) {
    for (long i = 0; i < count; i++) {
        const layer *l = layers + i;
        const long hidden = l->mlp.hidden;
        for (long t = 0; t < takes; t++)
            for (long m = 0; taken[t] == i && m < v->rows; m++)
                memcpy(features + (m * takes + t) * hidden, x + m * hidden, hidden * sizeof(bf16));
        rms_norm(x, hidden, l->input_norm, l->attention.eps, normed, v->rows, hidden, v->threads);
        run_attention(&l->attention, v, i, normed, hidden, x, hidden, x);
        rms_norm(x, hidden, l->post_norm, l->attention.eps, normed, v->rows, hidden, v->threads);
        run_mlp(&l->mlp, v->rows, normed, x, x, v->buffer, v->threads);
    }
}
