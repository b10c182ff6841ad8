/* The arithmetic of SGD and Adam over arrays: see update_rules.py.

   In: at most BLOCK numbers of each thing, in fp32, in arrays that do not overlap.
   Out: weights and moments, updated in place. The order of operations is that of
   torch.optim; nothing is contracted, so each loop rounds as it reads. */

#ifndef HALFSTEP_RULES_H
#define HALFSTEP_RULES_H

#include <math.h>
#include <stdint.h>

/* Numbers of one parameter, rounded to fp32 once. */
typedef struct {
    float lr, decay, shrink, momentum, keep;
    float near, beta2, rest2, root, eps, size;
} Rounded;

static void decay(float *restrict g, const float *restrict w, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) g[i] = g[i] + factor * w[i];
}

static void shrink(float *restrict w, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) w[i] = w[i] * factor;
}

static void descend(float *restrict w, const float *restrict g, float lr, int64_t n) {
    for (int64_t i = 0; i < n; i++) w[i] = w[i] - lr * g[i];
}

static inline void follow(float *restrict w, const float *restrict g, float *restrict a,
                          const Rounded *at, int64_t n, int first, int nesterov) {
    float lr = at->lr, momentum = at->momentum, keep = at->keep;
    for (int64_t i = 0; i < n; i++) {
        float mean = first ? g[i] : momentum * a[i] + keep * g[i];
        a[i] = mean;
        w[i] = w[i] - lr * (nesterov ? g[i] + momentum * mean : mean);
    }
}

static inline void adapt(float *restrict w, const float *restrict g, float *restrict a,
                         float *restrict b, float *restrict c, const Rounded *at,
                         int64_t n, int far, int amsgrad) {
    float near = at->near, beta2 = at->beta2, rest2 = at->rest2;
    float root = at->root, eps = at->eps, size = at->size;
    for (int64_t i = 0; i < n; i++) {
        float gap = g[i] - a[i];
        /* torch.lerp goes from the nearer end. */
        float mean = far ? g[i] - gap * near : a[i] + near * gap;
        float square = beta2 * b[i] + rest2 * g[i] * g[i];
        a[i] = mean;
        b[i] = square;
        if (amsgrad) {
            float peak = c[i];
            /* As torch.maximum, it is NaN where either is. */
            square = square > peak || square != square ? square : peak;
            c[i] = square;
        }
        w[i] = w[i] - size * (mean / (sqrtf(square) / root + eps));
    }
}

#endif
