/* Updates many parameters, and checks gradients, in one pass over memory.

   halfstep_update and halfstep_check_finite read a table of 64-bit numbers and addresses,
   one column for each property of a parameter. cpu_kernels.py calls them, and defines the
   same constants.

   Blocks: a block of elements is widened to fp32 in the L1 cache, updated there by one loop
   that all encodings share, and written back. So main memory is accessed once, each loop is
   simple enough to be vectorized, and all encodings agree bit for bit.

   Threads: the work is cut into equal ranges, and each element is computed independently, so
   results do not depend on the number of threads. The threads are those of the OpenMP runtime
   that torch has loaded, called through `Threads`; a second runtime would start its own
   threads, which compete with torch's for the cores. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__F16C__) && !defined(HALFSTEP_PORTABLE)
#include <immintrin.h>
#endif

typedef uint16_t half; /* the bits of a bf16 or an fp16 */

enum { BLOCK = 512 };

#define INFINITE 0x7f800000u
#define MAGNITUDE 0x7fffffffu

static inline uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Rounding up turns some NaN into zero, and truncation turns others into infinity. */
static inline uint32_t keep_nan(uint32_t bits, uint32_t rounded) {
    return (bits & MAGNITUDE) > INFINITE ? (bits >> 16) | 0x40 : rounded;
}

/* bf16 */

static inline float wide(half number) { return float_of((uint32_t)number << 16); }

static inline half nearest(float number) {
    uint32_t bits = bits_of(number);
    return (half)keep_nan(bits, (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Never rounds up to infinity. */
static inline half stochastic_round(float number, uint32_t sixteen) {
    uint32_t bits = bits_of(number), high = bits >> 16;
    uint32_t carry = ((bits & 0xffff) + sixteen) >> 16;
    carry = (high & 0x7fff) < 0x7f7f ? carry : 0;
    return (half)keep_nan(bits, high + carry);
}

static void widen(const half *restrict from, float *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = wide(from[i]);
}

static void publish(const float *restrict from, half *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = nearest(from[i]);
}

static void stochastic_round_high(const float *restrict from, half *restrict to,
                      const uint32_t *restrict random, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = stochastic_round(from[i], random[i] >> 16);
}

static void stochastic_round_low(const float *restrict from, half *restrict to,
                     const uint32_t *restrict random, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = stochastic_round(from[i], random[i] & 0xffff);
}

/* split: bf16 and the low 16 bits, see bf16_codecs.py. */

static void split_decode(const half *restrict weight, const uint16_t *restrict rest,
                         float *restrict fp32, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t high = weight[i], low = rest[i], size = high & 0x7fff;
        /* Encoding can round up only to these magnitudes: not to zero, and not to NaN. */
        uint32_t carried = (low >> 15) & (size - 1 < INFINITE >> 16);
        fp32[i] = float_of(((high - carried) << 16) | low);
    }
}

static void split_encode(const float *restrict fp32, half *restrict weight,
                         uint16_t *restrict rest, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(fp32[i]);
        rest[i] = (uint16_t)bits;
        weight[i] = (half)keep_nan(bits, (bits + 0x8000) >> 16);
    }
}

/* kahan: bf16 and a compensation term, see bf16_codecs.py. */

static void kahan_decode(const half *restrict weight, const half *restrict residual,
                         float *restrict fp32, int64_t n) {
    for (int64_t i = 0; i < n; i++) fp32[i] = wide(weight[i]) + wide(residual[i]);
}

static void kahan_encode(const float *restrict fp32, half *restrict weight,
                         half *restrict residual, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        half high = nearest(fp32[i]);
        half low = nearest(fp32[i] - wide(high));
        weight[i] = high;
        residual[i] = (high & 0x7f80) == 0x7f80 ? 0 : low;
    }
}

/* fp16: rounds to nearest even, including subnormals. */

static inline float wide16(half number) {
    uint32_t size = number & 0x7fff, sign = (uint32_t)(number & 0x8000) << 16;
    uint32_t normal = (size << 13) + (112u << 23);
    uint32_t special = (size << 13) | INFINITE | (size > 0x7c00 ? 0x400000 : 0);
    uint32_t subnormal = bits_of((float)(int32_t)size * 0x1p-24f);
    uint32_t bits = size < 0x400 ? subnormal : size < 0x7c00 ? normal : special;
    return float_of(bits | sign);
}

static inline half nearest16(float number) {
    uint32_t size = bits_of(number) & MAGNITUDE, sign = bits_of(number) >> 31 << 15;
    uint32_t normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    uint32_t nan = 0x7e00 | ((size >> 13) & 0x3ff);
    /* fp32 just above 0.5 has a spacing of 2**-24, like subnormal fp16. */
    uint32_t subnormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    uint32_t finite = size < 0x38800000 ? subnormal : normal;
    uint32_t special = size > INFINITE ? nan : 0x7c00;
    return (half)(sign | (size < 0x47800000 ? finite : special));
}

static void widen16(const half *restrict from, float *restrict to, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__) && !defined(HALFSTEP_PORTABLE)
    for (; i + 8 <= n; i += 8) {
        __m128i eight = _mm_loadu_si128((const __m128i *)(from + i));
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(eight));
    }
#endif
    for (; i < n; i++) to[i] = wide16(from[i]);
}

static void publish16(const float *restrict from, half *restrict to, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__) && !defined(HALFSTEP_PORTABLE)
    for (; i + 8 <= n; i += 8) {
        __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from + i),
                                        _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(to + i), eight);
    }
#endif
    for (; i < n; i++) to[i] = nearest16(from[i]);
}

/* Counter-based random numbers, see bf16_codecs.py. */

static uint64_t splitmix(uint64_t state) {
    uint64_t mixed = state + 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return mixed ^ (mixed >> 31);
}

static uint64_t key(uint64_t seed, uint64_t step, uint64_t index, uint64_t stream) {
    return splitmix(splitmix(splitmix(splitmix(seed) ^ step) ^ index) ^ stream);
}

static inline uint32_t mix(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x21f0aaadu;
    word = (word ^ (word >> 15)) * 0x735a2d97u;
    return word ^ (word >> 15);
}

static void randoms(uint64_t words, int64_t start, uint32_t *restrict to, int64_t n) {
    uint32_t first = (uint32_t)words + (uint32_t)start;
    uint32_t second = (uint32_t)(words >> 32);
    for (int64_t i = 0; i < n; i++) to[i] = mix(mix(first + (uint32_t)i) ^ second);
}

/* SGD and Adam over arrays, in place, see fused_step.py.

   Arrays are fp32, do not overlap, and have at most BLOCK elements. The order of operations
   is that of torch.optim; without multiply-add fusion each operation rounds separately. */

/* Hyperparameters and bias corrections of one parameter, rounded to fp32 once. */
typedef struct {
    float lr, decay, shrink, momentum, keep;
    float near, beta2, rest2, root, eps, size;
} Rounded;

static void add_l2(float *restrict g, const float *restrict w, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) g[i] = g[i] + factor * w[i];
}

static void decoupled_weight_decay(float *restrict w, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) w[i] = w[i] * factor;
}

static void sgd_step(float *restrict w, const float *restrict g, float lr, int64_t n) {
    for (int64_t i = 0; i < n; i++) w[i] = w[i] - lr * g[i];
}

static inline void sgd_momentum_step(float *restrict w, const float *restrict g, float *restrict a,
                          const Rounded *at, int64_t n, int first, int nesterov) {
    float lr = at->lr, momentum = at->momentum, keep = at->keep;
    for (int64_t i = 0; i < n; i++) {
        float mean = first ? g[i] : momentum * a[i] + keep * g[i];
        a[i] = mean;
        w[i] = w[i] - lr * (nesterov ? g[i] + momentum * mean : mean);
    }
}

static inline void adam_step(float *restrict w, const float *restrict g, float *restrict a,
                         float *restrict b, float *restrict c, const Rounded *at,
                         int64_t n, int far, int amsgrad) {
    float near = at->near, beta2 = at->beta2, rest2 = at->rest2;
    float root = at->root, eps = at->eps, size = at->size;
    for (int64_t i = 0; i < n; i++) {
        float gap = g[i] - a[i];
        /* torch.lerp starts from the nearer end point. */
        float mean = far ? g[i] - gap * near : a[i] + near * gap;
        float square = beta2 * b[i] + rest2 * g[i] * g[i];
        a[i] = mean;
        b[i] = square;
        if (amsgrad) {
            float peak = c[i];
            /* NaN in either operand propagates, as in torch.maximum. */
            square = square > peak || square != square ? square : peak;
            c[i] = square;
        }
        w[i] = w[i] - size * (mean / (sqrtf(square) / root + eps));
    }
}

enum { PLAIN, MASTER_BF16, MASTER_FP16, SPLIT, KAHAN, STOCHASTIC };
enum { FP32, BF16, FP16 };
enum { NUMEL, WEIGHT, GRADIENT, EXTRA, STATE0, STATE1, STATE2, STEP, INDEX, DTYPE };
enum { MAXIMIZE = 1, NESTEROV = 2, DECOUPLED = 4 };
enum { AMSGRAD = 8, MOMENTUM = 16, ADAM = 32 };

/* Fixed cost of a parameter, in elements. */
enum { SETUP = 256 };
/* Elements per thread below which starting it is not worth the time. */
enum { WORTH_A_THREAD = 32768 };
/* Elements per partial sum of squares. */
enum { CHUNK = 4096 };

typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*number)(void);
    int (*count)(void);
    int64_t wanted;
} Threads;

typedef struct {
    double inverse, lr, weight_decay, eps;
    double first;  /* momentum, or beta1 */
    double second; /* dampening, or beta2 */
} Numbers;

typedef struct {
    const int64_t *table;
    int64_t items;
    Numbers given;
    int64_t flags, form, total, parts;
    uint64_t seed, step;
    const Threads *threads;
} Update;

typedef struct {
    float gradient[BLOCK], fp32[BLOCK], states[3][BLOCK];
    uint32_t random[2][BLOCK];
} Stage;

static void apply(const Update *up, const Rounded *at, int first, float *w, float *g,
                  float **states, int64_t n) {
    float *a = states[0], *b = states[1], *c = states[2];
    int64_t flags = up->flags;
    int nesterov = (flags & NESTEROV) != 0, far = up->given.first <= 0.5;
    if (flags & DECOUPLED)
        decoupled_weight_decay(w, at->shrink, n);
    else if (up->given.weight_decay != 0)
        add_l2(g, w, at->decay, n);
    if (flags & ADAM) {
        if (flags & AMSGRAD)
            far ? adam_step(w, g, a, b, c, at, n, 1, 1) : adam_step(w, g, a, b, c, at, n, 0, 1);
        else
            far ? adam_step(w, g, a, b, c, at, n, 1, 0) : adam_step(w, g, a, b, c, at, n, 0, 0);
    } else if (!(flags & MOMENTUM))
        sgd_step(w, g, at->lr, n);
    else if (first)
        nesterov ? sgd_momentum_step(w, g, a, at, n, 1, 1)
                 : sgd_momentum_step(w, g, a, at, n, 1, 0);
    else
        nesterov ? sgd_momentum_step(w, g, a, at, n, 0, 1)
                 : sgd_momentum_step(w, g, a, at, n, 0, 0);
}

static Rounded rounded(const Update *up, const float *step) {
    const Numbers *given = &up->given;
    Rounded at = {0};
    at.lr = (float)given->lr;
    at.decay = (float)given->weight_decay;
    at.shrink = (float)(1 - given->lr * given->weight_decay);
    at.momentum = (float)given->first;
    at.keep = (float)(1 - given->second);
    if (up->flags & ADAM) {
        double far = given->first <= 0.5;
        at.near = (float)(far ? 1 - (1 - given->first) : 1 - given->first);
        at.beta2 = (float)given->second;
        at.rest2 = (float)(1 - given->second);
        at.root = (float)sqrt(1 - pow(given->second, *step));
        at.eps = (float)given->eps;
        at.size = (float)(given->lr / (1 - pow(given->first, *step)));
    }
    return at;
}

/* Loading and storing one block. */

static void read_gradient(const void *from, int64_t at, int64_t dtype, float factor,
                          float *restrict to, int64_t n) {
    if (dtype == BF16)
        widen((const half *)from + at, to, n);
    else if (dtype == FP16)
        widen16((const half *)from + at, to, n);
    else
        memcpy(to, (const float *)from + at, (size_t)n * sizeof *to);
    for (int64_t i = 0; i < n; i++) to[i] = to[i] * factor;
}

/* Return where to update the fp32 values: in place if they are stored as fp32, else `to`. */
static float *decode_fp32(int64_t form, void *weight, void *residual, int64_t at, float *to,
                         int64_t n) {
    if (form == PLAIN) return (float *)weight + at;
    if (form == MASTER_BF16 || form == MASTER_FP16) return (float *)residual + at;
    const half *low = (const half *)weight + at;
    if (form == SPLIT)
        split_decode(low, (const half *)residual + at, to, n);
    else if (form == KAHAN)
        kahan_decode(low, (const half *)residual + at, to, n);
    else
        widen(low, to, n);
    return to;
}

static void encode_fp32(int64_t form, void *weight, void *residual, int64_t at,
                        const float *from, const uint32_t *random, int64_t n) {
    if (form == PLAIN) return;
    half *low = (half *)weight + at;
    if (form == MASTER_BF16)
        publish(from, low, n);
    else if (form == MASTER_FP16)
        publish16(from, low, n);
    else if (form == SPLIT)
        split_encode(from, low, (half *)residual + at, n);
    else if (form == KAHAN)
        kahan_encode(from, low, (half *)residual + at, n);
    else
        stochastic_round_high(from, low, random, n);
}

static int64_t cell(const int64_t *table, int64_t items, int column, int64_t item) {
    return table[column * items + item];
}

static void *place(const int64_t *table, int64_t items, int column, int64_t item) {
    return (void *)(intptr_t)cell(table, items, column, item);
}

static void update_item(const Update *up, int64_t item, int64_t begin, int64_t end) {
    const int64_t *table = up->table, items = up->items;
    void *weight = place(table, items, WEIGHT, item);
    void *gradient = place(table, items, GRADIENT, item);
    void *residual = place(table, items, EXTRA, item);
    void *kept[3];
    for (int k = 0; k < 3; k++) kept[k] = place(table, items, STATE0 + k, item);
    int64_t index = cell(table, items, INDEX, item) >> 1;
    int first = (int)(cell(table, items, INDEX, item) & 1);
    int64_t dtype = cell(table, items, DTYPE, item) & 3;
    int64_t form = up->form;
    if (form == MASTER_BF16 && cell(table, items, DTYPE, item) >> 2 == FP16)
        form = MASTER_FP16;
    Rounded at = rounded(up, place(table, items, STEP, item));
    float factor = (float)up->given.inverse;
    if (up->flags & MAXIMIZE) factor = -factor;
    int compact = form == KAHAN || form == STOCHASTIC;
    uint64_t words[2] = {0, 0};
    if (compact) {
        words[0] = key(up->seed, up->step, (uint64_t)index, 0);
        words[1] = key(up->seed, up->step, (uint64_t)index, 1);
    }
    Stage stage;
    for (int64_t i = begin; i < end; i += BLOCK) {
        int64_t n = end - i < BLOCK ? end - i : BLOCK;
        float *states[3];
        read_gradient(gradient, i, dtype, factor, stage.gradient, n);
        float *fp32 = decode_fp32(form, weight, residual, i, stage.fp32, n);
        for (int k = 0; k < 3; k++) {
            states[k] = compact || !kept[k] ? stage.states[k] : (float *)kept[k] + i;
            if (compact && kept[k]) widen((half *)kept[k] + i, states[k], n);
        }
        apply(up, &at, first, fp32, stage.gradient, states, n);
        if (compact && (form == STOCHASTIC || kept[0]))
            randoms(words[0], i, stage.random[0], n);
        if (compact && kept[1]) randoms(words[1], i, stage.random[1], n);
        encode_fp32(form, weight, residual, i, fp32, stage.random[0], n);
        if (!compact) continue;
        if (kept[0]) stochastic_round_low(states[0], (half *)kept[0] + i, stage.random[0], n);
        if (kept[1]) stochastic_round_high(states[1], (half *)kept[1] + i, stage.random[1], n);
        if (kept[2]) stochastic_round_low(states[2], (half *)kept[2] + i, stage.random[1], n);
    }
}

/* Splitting work over threads. */

/* Return the element of a parameter at `point` of the total work, rounded down to 64. */
static int64_t cut(int64_t point, int64_t offset, int64_t numel) {
    int64_t inside = point - offset;
    if (inside <= 0) return 0;
    inside -= inside % 64;
    return inside < numel ? inside : numel;
}

static int64_t point(int64_t total, int64_t part, int64_t parts) {
    return total / parts * part + total % parts * part / parts;
}

static void update_part(const Update *up, int64_t part) {
    int64_t low = point(up->total, part, up->parts);
    int64_t high = point(up->total, part + 1, up->parts);
    int64_t offset = 0;
    for (int64_t item = 0; item < up->items && offset < high; item++) {
        int64_t numel = up->table[item];
        int64_t begin = cut(low, offset, numel), end = cut(high, offset, numel);
        if (begin < end) update_item(up, item, begin, end);
        offset += numel + SETUP;
    }
}

static void update_team(void *given) {
    const Update *up = given;
    int64_t team = up->threads->count();
    for (int64_t part = up->threads->number(); part < up->parts; part += team)
        update_part(up, part);
}

static int64_t parts_of(const Threads *threads, int64_t total) {
    int64_t most = 1 + total / WORTH_A_THREAD;
    int64_t wanted = threads->parallel && threads->wanted > 1 ? threads->wanted : 1;
    return wanted < most ? wanted : most;
}

void halfstep_update(const int64_t *table, int64_t items, const double *numbers,
                     int64_t flags, int64_t form, const uint64_t *clock,
                     const Threads *threads) {
    Update up = {.table = table, .items = items, .flags = flags, .form = form};
    memcpy(&up.given, numbers, sizeof up.given);
    up.seed = clock[0];
    up.step = clock[1];
    up.threads = threads;
    for (int64_t item = 0; item < items; item++) up.total += table[item] + SETUP;
    up.parts = parts_of(threads, up.total);
    if (up.parts == 1)
        update_part(&up, 0);
    else
        threads->parallel(update_team, &up, (unsigned)up.parts, 0);
}

/* Checking gradients for inf and NaN. */

typedef struct {
    const int64_t *table;
    int64_t items, norm, total, parts;
    double *sums;
    int32_t *found;
    const Threads *threads;
} Check;

static double squares(const float *restrict from, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += (double)from[i] * (double)from[i];
    return sum;
}

static int32_t has_nonfinite16(const half *restrict from, int64_t n, half infinite) {
    int32_t any = 0;
    for (int64_t i = 0; i < n; i++) any |= (from[i] & infinite) == infinite;
    return any;
}

static int32_t has_nonfinite32(const float *restrict from, int64_t n) {
    int32_t any = 0;
    for (int64_t i = 0; i < n; i++)
        any |= (bits_of(from[i]) & INFINITE) == INFINITE;
    return any;
}

static int32_t check_chunk(const Check *at, int64_t item, int64_t begin, int64_t n,
                          double *sum) {
    const void *from = place(at->table, at->items, 1, item);
    int64_t dtype = cell(at->table, at->items, 2, item);
    const float *full = (const float *)from + begin;
    const half *low = (const half *)from + begin;
    float numbers[BLOCK];
    int32_t any = 0;
    *sum = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t size = n - i < BLOCK ? n - i : BLOCK;
        if (dtype == FP32)
            any |= has_nonfinite32(full + i, size);
        else
            any |= has_nonfinite16(low + i, size, dtype == BF16 ? 0x7f80 : 0x7c00);
        if (!at->norm) continue;
        if (dtype == BF16)
            widen(low + i, numbers, size);
        else if (dtype == FP16)
            widen16(low + i, numbers, size);
        *sum += squares(dtype == FP32 ? full + i : numbers, size);
    }
    return any;
}

static void check_part(const Check *at, int64_t part) {
    int64_t low = point(at->total, part, at->parts);
    int64_t high = point(at->total, part + 1, at->parts);
    int64_t chunk = 0;
    int32_t any = 0;
    for (int64_t item = 0; item < at->items && chunk < high; item++) {
        int64_t numel = at->table[item];
        for (int64_t begin = 0; begin < numel; begin += CHUNK, chunk++) {
            int64_t n = numel - begin < CHUNK ? numel - begin : CHUNK;
            if (chunk < low || chunk >= high) continue;
            any |= check_chunk(at, item, begin, n, at->sums + chunk);
        }
    }
    at->found[part] = any;
}

static void check_team(void *given) {
    const Check *at = given;
    int64_t team = at->threads->count();
    for (int64_t part = at->threads->number(); part < at->parts; part += team)
        check_part(at, part);
}

/* Write found_inf and the sum of squares; return 0, or 1 if there is no memory for the
   partial sums. */
int32_t halfstep_check_finite(const int64_t *table, int64_t items, int64_t norm, float *found,
                      double *sum, const Threads *threads) {
    Check at = {.table = table, .items = items, .norm = norm, .threads = threads};
    for (int64_t item = 0; item < items; item++)
        at.total += (table[item] + CHUNK - 1) / CHUNK;
    at.parts = parts_of(threads, at.total * CHUNK);
    at.sums = malloc((size_t)(at.total + 1) * sizeof *at.sums);
    at.found = calloc((size_t)at.parts, sizeof *at.found);
    int32_t failed = !at.sums || !at.found, any = 0;
    if (!failed) {
        if (at.parts == 1)
            check_part(&at, 0);
        else
            threads->parallel(check_team, &at, (unsigned)at.parts, 0);
        *sum = 0;
        /* In the order of the chunks, for any number of threads. */
        for (int64_t chunk = 0; chunk < at.total; chunk++) *sum += at.sums[chunk];
        for (int64_t part = 0; part < at.parts; part++) any |= at.found[part];
        *found = any ? 1.0f : 0.0f;
    }
    free(at.sums);
    free(at.found);
    return failed;
}
