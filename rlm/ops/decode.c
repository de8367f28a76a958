/* A decoding step, and the operations between its matmuls, for CPUs; compiled by cpu.py.
 *
 * Attention: each row is one completion and has one new token. The keys and values of the new token
 * are stored first. Then the queries of the token attend to the three segments of the row: the
 * prefix that all prompts share, the rest of the row's prompt, and the completion. With matmuls,
 * this attention would take a dozen passes, and oneDNN would first copy a bf16 matrix into another
 * layout, which takes longer than the matmul. Here the keys and values are read once, in place.
 *
 * Rotary embedding takes one pass. torch needs half a dozen passes, each of which takes a few
 * microseconds to start. The norm is in learn.c.
 *
 * kernels.py defines the macros QUERIES (query heads per key-value head), WIDTH (of a head) and, for
 * bf16, BF16. The code uses the vector types of GCC and Clang; in loops of constant length, the
 * compiler keeps arrays of vectors in registers.
 */
#include "numbers.h"

enum {
    Q = QUERIES,
    D = WIDTH,
#ifdef __AVX512F__
    WIDEST = 16,
#else
    WIDEST = 8,
#endif
    HALF = (D & -D) / 2, /* half of the largest power of two that divides D */
    SIDE = HALF < WIDEST ? HALF : WIDEST, /* floats in each vector of a pair */
    PAIR = 2 * SIDE,    /* numbers loaded at a time */
    BLOCK = 2 * WIDEST, /* tokens scored at a time */
    LINE = 64 / sizeof(number), /* numbers in a cache line */
    FITTING = 12 * WIDEST / Q, /* dimensions of a head whose sums fit into the registers */
    /* dimensions of a head that are summed at a time */
    PART = D <= FITTING ? D : 2 * PAIR <= FITTING && D % (2 * PAIR) == 0 ? 2 * PAIR : PAIR,
};

typedef float side __attribute__((vector_size(4 * SIDE)));

/* PAIR numbers, widened to fp32. fp32 numbers stay in order. bf16 numbers are split into those with
 * even and those with odd indices, which takes a shift and a mask; widening the numbers in order
 * would take three times as many instructions. The types for unaligned memory are used instead of
 * memcpy, because GCC copies in halves of 32 bytes, and a load that waits for two stores is slow. */
typedef struct {
    side one, other;
} pair;

typedef side stored_side __attribute__((aligned(4), may_alias));

#ifdef BF16
typedef uint32_t words __attribute__((vector_size(4 * SIDE)));
typedef words stored_words __attribute__((aligned(2), may_alias));

static inline pair load(const number *from) {
    words both = *(const stored_words *)from;
    return (pair){(side)(both << 16), (side)(both & 0xffff0000)};
}
static inline void store(float *to, pair sums) {
    for (int i = 0; i < SIDE; i++) {
        to[2 * i] = sums.one[i];
        to[2 * i + 1] = sums.other[i];
    }
}
#else
static inline pair load(const number *from) {
    return (pair){*(const stored_side *)from, *(const stored_side *)(from + SIDE)};
}
static inline void store(float *to, pair sums) {
    *(stored_side *)to = sums.one;
    *(stored_side *)(to + SIDE) = sums.other;
}
#endif

/* A cache: keys (layers, slots, heads, D, tokens) and values (layers, slots, heads, tokens, D). */
typedef struct {
    number *keys, *values;
    int64_t slots, tokens;
    const int64_t *slot, *length; /* per row: the slot it reads, and how many tokens */
} segment;

enum { SEGMENTS = 3 }; /* the last segment contains the completions and the new tokens */

typedef struct {
    int64_t rows, heads;
    segment parts[SEGMENTS];
} step;

/* Returns the index at which the keys or values of a row and head begin; turn = head · rows + row. */
static inline int64_t start(const segment *part, const step *s, int64_t layer, int64_t turn) {
    int64_t slot = part->slot[turn % s->rows], head = turn / s->rows;
    return ((layer * part->slots + slot) * s->heads + head) * D * part->tokens;
}

/* Adds queries[q][d] keys[:BLOCK] to the sums of each query. */
static inline __attribute__((always_inline)) void
add_scores(const float *queries, int64_t d, const number *keys, pair sum[Q][BLOCK / PAIR]) {
    for (int i = 0; i < BLOCK / PAIR; i++) {
        pair key = load(keys + i * PAIR);
        for (int q = 0; q < Q; q++) {
            sum[q][i].one += queries[q * D + d] * key.one;
            sum[q][i].other += queries[q * D + d] * key.other;
        }
    }
}

/* Computes out[q][t] = queries[q] · keys[:, t] for t < length, with keys (D, tokens). Prefetches
 * the `next` keys: these keys lie in short runs, which the CPU would not prefetch by itself. */
static void score(const float *queries, const number *keys, int64_t tokens, int64_t length,
                  float *out, int64_t stride, const number *next) {
    for (int64_t t = 0; t < length; t += BLOCK) {
        int64_t stored = tokens - t, n = length - t < BLOCK ? length - t : BLOCK;
        /* A block may extend beyond the tokens of its row of keys; the sums of the numbers there
         * are not used. The last rows are copied if their blocks extend beyond all keys. */
        int64_t inside = (D * tokens - t - BLOCK + tokens) / tokens;
        int64_t direct = inside < 0 ? 0 : inside < D ? inside : D;
        number last[D][BLOCK];
        for (int64_t d = direct; d < D; d++)
            for (int i = 0; i < BLOCK; i++)
                last[d][i] = i < stored ? keys[d * tokens + t + i] : (number)0;
        pair sum[Q][BLOCK / PAIR] = {0};
        for (int64_t d = 0; d < direct; d++) {
            for (int i = 0; i < BLOCK; i += LINE)
                __builtin_prefetch(next + d * tokens + t + i, 0, 2);
            add_scores(queries, d, keys + d * tokens + t, sum);
        }
        for (int64_t d = direct; d < D; d++) add_scores(queries, d, last[d], sum);
        for (int q = 0; q < Q; q++) {
            float scores[BLOCK];
            for (int i = 0; i < BLOCK / PAIR; i++) store(scores + i * PAIR, sum[q][i]);
            memcpy(out + q * stride + t, scores, n * sizeof *scores);
        }
    }
}

/* Adds weights[q][t] values[t] for all t < length to the sums, with values (tokens, D). Prefetches
 * the `next` values. */
static void add(const float *weights, int64_t stride, const number *values, int64_t length,
                const number *next, pair sums[Q][D / PAIR]) {
    for (int part = 0; part < D / PAIR; part += PART / PAIR) {
        pair sum[Q][PART / PAIR];
        for (int q = 0; q < Q; q++)
            for (int i = 0; i < PART / PAIR; i++) sum[q][i] = sums[q][part + i];
        for (int64_t t = 0; t < length; t++) {
            for (int i = 0; i < PART; i += LINE)
                __builtin_prefetch(next + t * D + part * PAIR + i, 0, 2);
            for (int i = 0; i < PART / PAIR; i++) {
                pair value = load(values + t * D + (part + i) * PAIR);
                for (int q = 0; q < Q; q++) {
                    sum[q][i].one += weights[q * stride + t] * value.one;
                    sum[q][i].other += weights[q * stride + t] * value.other;
                }
            }
        }
        for (int q = 0; q < Q; q++)
            for (int i = 0; i < PART / PAIR; i++) sums[q][part + i] = sum[q][i];
    }
}

/* Replaces scores, which are exponents of 2, by weights, and returns the sum of the weights. */
static float exponentials(float *scores, int64_t n) {
    float most = scores[0], sum = 0;
#pragma omp simd reduction(max : most)
    for (int64_t t = 0; t < n; t++) most = scores[t] > most ? scores[t] : most;
    for (int64_t t = 0; t < n; t++) scores[t] = power_of_two(scores[t] - most);
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < n; t++) sum += scores[t];
    return sum;
}

/* Computes the attention of one row for the queries of one key-value head. First stores the key and
 * the value of the new token, unless the key is NULL. */
static void attend_head(const step *s, int64_t layer, int64_t turn, float scale,
                        const number *queries, const number *key, const number *value,
                        float *weights, int64_t stride, number *out) {
    const segment *own = &s->parts[SEGMENTS - 1];
    int64_t row = turn % s->rows, next = (turn + 1) % (s->rows * s->heads);
    int64_t place = start(own, s, layer, turn), now = own->length[row] - 1;
    if (key) {
        for (int64_t d = 0; d < D; d++) own->keys[place + d * own->tokens + now] = key[d];
        memcpy(own->values + place + now * D, value, D * sizeof *value);
    }

    float wide[Q * D];
    for (int i = 0; i < Q * D; i++) wide[i] = widened(queries[i]) * scale * LOG2_E;
    int64_t total = 0;
    for (int i = 0; i < SEGMENTS; i++) {
        const segment *part = &s->parts[i];
        score(wide, part->keys + start(part, s, layer, turn), part->tokens, part->length[row],
              weights + total, stride, part->keys + start(part, s, layer, next));
        total += part->length[row];
    }
    float mass[Q];
    for (int q = 0; q < Q; q++) mass[q] = exponentials(weights + q * stride, total);
    pair sums[Q][D / PAIR] = {0};
    total = 0;
    for (int i = 0; i < SEGMENTS; i++) {
        const segment *part = &s->parts[i];
        add(weights + total, stride, part->values + start(part, s, layer, turn), part->length[row],
            part->values + start(part, s, layer, next), sums);
        total += part->length[row];
    }
    for (int q = 0; q < Q; q++) {
        float sum[D];
        for (int i = 0; i < D / PAIR; i++) store(sum + i * PAIR, sums[q][i]);
        for (int d = 0; d < D; d++) out[q * D + d] = rounded(sum[d] / mass[q]);
    }
}

/* Computes the attention of all rows, with queries and out (rows, heads · Q, D). The new keys and
 * values are (rows, heads, D), or NULL if they are stored already. Each stride is the distance
 * between rows. Returns 1 if there is not enough memory for the scores. */
int decode_attention(const step *s, int64_t layer, float scale, const number *queries,
                     int64_t query_stride, const number *keys, int64_t key_stride,
                     const number *values, int64_t value_stride, number *out, int threads) {
    int64_t longest = 0;
    for (int64_t row = 0; row < s->rows; row++) {
        int64_t total = 0;
        for (int i = 0; i < SEGMENTS; i++) total += s->parts[i].length[row];
        longest = total > longest ? total : longest;
    }
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *weights = malloc(Q * longest * sizeof *weights);
        failed = !weights;
#pragma omp for schedule(static)
        for (int64_t turn = 0; turn < s->rows * s->heads; turn++) {
            int64_t row = turn % s->rows, head = turn / s->rows;
            if (weights)
                attend_head(s, layer, turn, scale, queries + row * query_stride + head * Q * D,
                            keys ? keys + row * key_stride + head * D : NULL,
                            keys ? values + row * value_stride + head * D : NULL, weights,
                            longest, out + (row * s->heads + head) * Q * D);
        }
        free(weights);
    }
    return failed;
}

/* Applies rotary position embedding in place to x (rows, heads, D), whose rows are `stride` numbers
 * apart. cos and sin are (rows, D). */
void rotary_embedding(number *x, const number *cos, const number *sin, int64_t rows, int64_t heads,
                      int64_t stride, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * heads * D >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const number *c = cos + row * D, *s = sin + row * D;
        for (int64_t head = 0; head < heads; head++) {
            number *low = x + row * stride + head * D, *high = low + D / 2;
            for (int i = 0; i < D / 2; i++) {
                float l = widened(low[i]), h = widened(high[i]);
                low[i] = rounded(l * widened(c[i]) - h * widened(s[i]));
                high[i] = rounded(h * widened(c[i + D / 2]) + l * widened(s[i + D / 2]));
            }
        }
    }
}

#ifdef MATMULS
/* A layer of the Llama family. Without norms of the heads, query_norm and key_norm are NULL. */
typedef struct {
    product qkv, out, gated, down;
    const number *query_norm, *key_norm; /* (D,) */
    float epsilon, scale;
} layer;

static void multiply(product p, int64_t rows, const number *x, const number *residual, number *out,
                     int threads) {
    p.rows = rows;
    p.x = x;
    p.residual = residual;
    p.out = out;
    linear(&p, threads);
}

/* Runs all layers for one new token per row: x (rows, hidden) is overwritten with the result. cos
 * and sin are (rows, D). If Python called each operation of each layer, the calls would take as
 * long as the matmuls of a few rows. Returns 1 if there is not enough memory. */
int decode_layers(const layer *layers, int64_t count, const step *s, number *x, const number *cos,
                  const number *sin, int threads) {
    int64_t rows = s->rows, heads = s->heads * Q, width = (heads + 2 * s->heads) * D;
    number *qkv = malloc(rows * (width + heads * D + layers->down.inputs) * sizeof *qkv);
    if (!qkv) return 1;
    number *keys = qkv + heads * D, *values = keys + s->heads * D;
    number *attended = qkv + rows * width, *gated = attended + rows * heads * D;
    int failed = 0;
    for (int64_t i = 0; i < count && !failed; i++) {
        const layer *l = &layers[i];
        multiply(l->qkv, rows, x, NULL, qkv, threads);
        if (l->query_norm) {
#pragma omp parallel for num_threads(threads) if (rows * width >= WORTH_THREADS)
            for (int64_t row = 0; row < rows; row++) {
                number *query = qkv + row * width, *key = keys + row * width;
                rms_norm(query, l->query_norm, query, heads, D, l->epsilon, 1);
                rms_norm(key, l->key_norm, key, s->heads, D, l->epsilon, 1);
            }
        }
        rotary_embedding(qkv, cos, sin, rows, heads + s->heads, width, threads);
        failed = decode_attention(s, i, l->scale, qkv, width, keys, width, values, width, attended,
                                  threads);
        multiply(l->out, rows, attended, x, x, threads);
        multiply(l->gated, rows, x, NULL, gated, threads);
        multiply(l->down, rows, gated, x, x, threads);
    }
    free(qkv);
    return failed;
}
#endif
