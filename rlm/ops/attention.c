/* Attention of a training pass, and its gradients: softmax(scale · q kᵀ) v over visible keys.
 *
 * The code works on blocks of 16 tokens. The queries of a block, of all heads that share a
 * key-value head, attend to the blocks of keys that are visible to any of these queries. A packed
 * rollout sees only its prompt and itself, so most blocks are skipped. Scores are stored as (keys,
 * queries): the softmax then runs over whole vectors of queries, and the gradients of keys and
 * values need no transposition.
 *
 * Sums are computed in fp32; attention weights and their gradients are rounded to the dtype before
 * the next matmul. Nothing is saved for the backward pass, which recomputes the scores. A sum over
 * queries always has PARTS partial sums, so the results do not depend on the number of threads.
 */
#include "numbers.h"

#ifdef PAIRS
static inline element as_element(number x) { return x; }
static inline element narrowed(float x) { return rounded(x); }
static inline operand load(const element *x) { return (operand)_mm512_loadu_si512(x); }
#else
static inline element as_element(number x) { return widened(x); }
static inline element narrowed(float x) { return widened(rounded(x)); }
static inline operand load(const element *x) { return *(const stored_floats *)x; }
#endif

enum {
    Q = QUERIES, /* query heads per key-value head */
    D = WIDTH,   /* width of a head */
    TOKENS = 16, /* tokens per block */
    R = Q * TOKENS,            /* queries per block; a query's index is head · TOKENS + token */
    W = (D + 15) / 16 * 16,    /* D, rounded up to whole vectors and padded with zeros */
    TOGETHER = 4 / sizeof(element), /* elements multiplied at a time */
    PARTS = 4, /* partial sums of a sum over queries */
    ROWS = VECTOR_ROWS, /* rows multiplied at a time */
};

/* Maximum number of column vectors multiplied at a time: the sums of three vectors fill the
 * registers. */
enum { MOST = 3 };

/* Computes sums (ROWS, columns) += left · right for as many column vectors as `vectors` (a
 * constant). The inner dimension is divided into pieces of `inner` elements. Piece p of left begins
 * at pieces[p] · size, and its rows are `stride` elements apart. The pieces of right, (inner /
 * TOGETHER, columns, TOGETHER), are contiguous. */
static inline __attribute__((always_inline)) void
tile(const int vectors, const element *left, int64_t stride, const int32_t *pieces, int64_t count,
     int64_t size, int64_t inner, const element *right, int64_t columns, float *sums) {
    stored_floats sum[ROWS][MOST]; /* in registers */
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < vectors; j++) sum[i][j] = *(stored_floats *)(sums + i * columns + j * LANES);
    for (int64_t p = 0; p < count; p++) {
        const element *from = left + pieces[p] * size;
        for (int64_t k = 0; k < inner; k += TOGETHER, right += columns * TOGETHER) {
            operand other[MOST];
            for (int j = 0; j < vectors; j++) other[j] = load(right + j * LANES * TOGETHER);
            for (int i = 0; i < ROWS; i++) {
                operand one = same(from + i * stride + k);
                for (int j = 0; j < vectors; j++) sum[i][j] = multiply_add(sum[i][j], one, other[j]);
            }
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < vectors; j++) *(stored_floats *)(sums + i * columns + j * LANES) = sum[i][j];
}

/* Does the same as `tile` for all columns and for `rows` rows, a multiple of ROWS. */
static void multiply_add_to(int64_t rows, const element *left, int64_t stride,
                            const int32_t *pieces, int64_t count, int64_t size, int64_t inner,
                            const element *right, int64_t columns, float *sums) {
    for (int64_t row = 0; row < rows; row += ROWS, left += ROWS * stride, sums += ROWS * columns)
        for (int64_t left_over = columns / LANES, at = 0; left_over;) {
            const element *r = right + at * TOGETHER;
            if (left_over == 3 || left_over > 4) {
                tile(3, left, stride, pieces, count, size, inner, r, columns, sums + at);
                left_over -= 3, at += 3 * LANES;
            } else if (left_over != 1) {
                tile(2, left, stride, pieces, count, size, inner, r, columns, sums + at);
                left_over -= 2, at += 2 * LANES;
            } else {
                tile(1, left, stride, pieces, count, size, inner, r, columns, sums + at);
                left_over -= 1;
            }
        }
}

/* The arguments of attention. Queries are (batch, tokens, heads · Q, D); keys and values are
 * (batch, tokens, heads, D). `hidden` (batch or 1, padded keys, padded queries) is not 0 where a
 * key is hidden from a query. `seen` (batch or 1, blocks of queries, blocks of keys) is not 0 where
 * any query of a block sees any key of a block. */
typedef struct {
    const number *queries, *keys, *values;
    const uint8_t *hidden, *seen;
    int64_t batch, tokens, heads, masks; /* masks: batch or 1 */
    float scale;
} attention;

static inline int64_t blocks_of(const attention *a) { return (a->tokens + TOKENS - 1) / TOKENS; }

/* Copies the keys or values of one head to `rows` (padded tokens, D) and to `turned` (blocks, W,
 * TOKENS), unless the respective target is NULL. */
static void copy_head(const attention *a, const number *from, int64_t b, int64_t head,
                      element *rows, element *turned) {
    int64_t padded = blocks_of(a) * TOKENS;
    for (int64_t t = 0; t < padded; t++) {
        const number *x = from + ((b * a->tokens + t) * a->heads + head) * D;
        element *block = turned + t / TOKENS * W * TOKENS + t % TOKENS;
        for (int d = 0; d < D; d++) {
            element one = t < a->tokens ? as_element(x[d]) : 0;
            if (rows) rows[t * D + d] = one;
            if (turned) block[d * TOKENS] = one;
        }
        for (int d = D; turned && d < W; d++) block[d * TOKENS] = 0;
    }
}

/* Copies a block of queries, or a block of the gradients of their output, as a right factor of
 * matmuls. The copy in by_width (D / TOGETHER, R, TOGETHER) has D as its inner dimension. The copy
 * in by_row (R / TOGETHER, W, TOGETHER) has R as its inner dimension; it is omitted if by_row is
 * NULL. */
static void copy_queries(const attention *a, const number *from, int64_t b, int64_t head,
                         int64_t block, element *by_width, element *by_row) {
    for (int r = 0; r < R; r++) {
        int64_t t = block * TOKENS + r % TOKENS, q = head * Q + r / TOKENS;
        const number *x = from + ((b * a->tokens + t) * a->heads * Q + q) * D;
        element row[W] = {0};
        for (int d = 0; d < D && t < a->tokens; d++) row[d] = as_element(x[d]);
        for (int d = 0; d < D; d += TOGETHER)
            memcpy(by_width + (d * R + r * TOGETHER), row + d, TOGETHER * sizeof *row);
        element *to = by_row + r / TOGETHER * W * TOGETHER + r % TOGETHER;
        for (int d = 0; by_row && d < W; d++) to[d * TOGETHER] = row[d];
    }
}

/* Multiplies sums (W, R) by a factor, rounds them, and writes them to the places of the queries in
 * out. */
static void put_queries(const attention *a, const float *sums, float factor, int64_t b,
                        int64_t head, int64_t block, number *out) {
    int64_t left = a->tokens - block * TOKENS, n = left < TOKENS ? left : TOKENS;
    for (int q = 0; q < Q; q++)
        for (int64_t t = 0; t < n; t++) {
            int64_t token = b * a->tokens + block * TOKENS + t;
            number *to = out + (token * a->heads * Q + head * Q + q) * D;
            for (int d = 0; d < D; d++) to[d] = rounded(factor * sums[d * R + q * TOKENS + t]);
        }
}

/* The memory of one thread for one block of queries and all keys. */
typedef struct {
    int32_t *visible; /* the visible blocks of keys */
    element *queries, *query_rows, *grads, *grad_rows; /* right factors */
    float *weights, *grad_weights, *sums;              /* (keys, R), (keys, R), (W, R) */
    element *narrow, *pairs;                           /* (keys, R) as a left and right factor */
} room;

static void *taken(char **from, int64_t bytes) {
    void *here = *from;
    *from += (bytes + 63) / 64 * 64;
    return here;
}

/* Places the buffers of the room at `memory`, and returns their total size in bytes. */
static int64_t make_room(room *s, int64_t blocks, char *memory) {
    char *at = memory;
    int64_t scores = blocks * TOKENS * R;
    s->visible = taken(&at, blocks * sizeof *s->visible);
    s->queries = taken(&at, R * W * sizeof(element));
    s->query_rows = taken(&at, R * W * sizeof(element));
    s->grads = taken(&at, R * W * sizeof(element));
    s->grad_rows = taken(&at, R * W * sizeof(element));
    s->sums = taken(&at, R * W * sizeof(float));
    s->weights = taken(&at, scores * sizeof(float));
    s->grad_weights = taken(&at, scores * sizeof(float));
    s->narrow = taken(&at, scores * sizeof(element));
    s->pairs = taken(&at, scores * sizeof(element));
    return at - memory;
}

/* Computes out (visible keys, R) = the rows of the visible blocks · a block of queries. */
static void score(const element *rows, const int32_t *visible, int64_t count,
                  const element *queries, float *out) {
    const int32_t whole = 0;
    memset(out, 0, count * TOKENS * R * sizeof *out);
    for (int64_t j = 0; j < count; j++)
        multiply_add_to(TOKENS, rows + visible[j] * TOKENS * D, D, &whole, 1, 0, D, queries, R,
                        out + j * TOKENS * R);
}

/* Rounds (keys, R), and stores the result as a left factor, and as a right factor with the keys as
 * its inner dimension. */
static void narrow(const float *from, int64_t keys, element *left, element *right) {
    for (int64_t c = 0; c < keys; c += TOGETHER)
        for (int j = 0; j < TOGETHER; j++)
            for (int r = 0; r < R; r++) {
                element one = narrowed(from[(c + j) * R + r]);
                left[(c + j) * R + r] = one;
                right[c * R + r * TOGETHER + j] = one;
            }
}

/* Computes the attention weights (visible keys, R) of a block of queries. Returns the number of
 * blocks of keys that are visible to these queries. */
static int64_t weigh(const attention *a, int64_t b, int64_t block, const element *keys, room *s) {
    int64_t blocks = blocks_of(a), mask = a->masks > 1 ? b : 0, count = 0;
    const uint8_t *seen = a->seen + (mask * blocks + block) * blocks;
    for (int64_t j = 0; j < blocks; j++)
        if (seen[j]) s->visible[count++] = j;
    score(keys, s->visible, count, s->queries, s->weights);
    float most[R], sum[R], factor = a->scale * LOG2_E;
    for (int r = 0; r < R; r++) most[r] = -INFINITY, sum[r] = 0;
    for (int64_t c = 0; c < count * TOKENS; c++) {
        int64_t key = s->visible[c / TOKENS] * TOKENS + c % TOKENS;
        const uint8_t *hidden = a->hidden + (mask * blocks * TOKENS + key) * blocks * TOKENS;
        float *row = s->weights + c * R, off[TOKENS];
        /* A query without visible keys gets equal weights, which are finite and never read. */
        for (int t = 0; t < TOKENS; t++) off[t] = hidden[block * TOKENS + t] ? -1e30f : 0;
        for (int q = 0; q < Q; q++)
            for (int t = 0; t < TOKENS; t++) {
                int r = q * TOKENS + t;
                row[r] = row[r] * factor + off[t];
                most[r] = row[r] > most[r] ? row[r] : most[r];
            }
    }
    for (int64_t c = 0; c < count * TOKENS; c++) {
        float *row = s->weights + c * R;
        for (int r = 0; r < R; r++) {
            float exponent = row[r] - most[r];
            row[r] = exponent < NOTHING ? NOTHING : exponent;
        }
        /* In a single loop with the comparison above, GCC would compile that comparison to a jump
         * and vectorize nothing. */
        for (int r = 0; r < R; r++) sum[r] += row[r] = power_of_two(row[r]);
    }
    for (int r = 0; r < R; r++) sum[r] = 1 / sum[r];
    for (int64_t c = 0; c < count * TOKENS; c++)
        for (int r = 0; r < R; r++) s->weights[c * R + r] *= sum[r];
    return count;
}

/* Computes the output, in the layout of the queries. Returns 1 if there is not enough memory. */
int attention_forward(const attention *a, number *out, int threads) {
    int64_t blocks = blocks_of(a), padded = blocks * TOKENS, pairs = a->batch * a->heads;
    int64_t bytes = make_room(&(room){0}, blocks, NULL);
    element *keys = malloc(pairs * padded * D * sizeof *keys);
    element *values = malloc(pairs * padded * W * sizeof *values);
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        room s;
        char *memory = malloc(bytes);
        failed = !memory || !keys || !values;
        make_room(&s, blocks, memory);
#pragma omp for schedule(static)
        for (int64_t pair = 0; pair < pairs; pair++) {
            int64_t b = pair / a->heads, head = pair % a->heads;
            if (failed) continue;
            copy_head(a, a->keys, b, head, keys + pair * padded * D, NULL);
            copy_head(a, a->values, b, head, NULL, values + pair * padded * W);
        }
#pragma omp for schedule(dynamic)
        for (int64_t turn = 0; turn < pairs * blocks; turn++) {
            int64_t pair = turn / blocks, block = turn % blocks;
            int64_t b = pair / a->heads, head = pair % a->heads;
            if (failed) continue;
            copy_queries(a, a->queries, b, head, block, s.queries, NULL);
            int64_t count = weigh(a, b, block, keys + pair * padded * D, &s);
            narrow(s.weights, count * TOKENS, s.narrow, s.pairs);
            memset(s.sums, 0, R * W * sizeof *s.sums);
            multiply_add_to(W, values + pair * padded * W, TOKENS, s.visible, count, W * TOKENS,
                            TOKENS, s.pairs, R, s.sums);
            put_queries(a, s.sums, 1, b, head, block, out);
        }
        free(memory);
    }
    free(keys);
    free(values);
    return failed;
}

/* Computes grad_queries for a block of queries, and adds the contributions of the block to
 * grad_keys and grad_values (padded tokens, W) of its head. */
static void block_backward(const attention *a, const number *grad_out, int64_t b, int64_t head,
                           int64_t block, const element *keys, const element *turned_keys,
                           const element *values, room *s, number *grad_queries, float *grad_keys,
                           float *grad_values) {
    copy_queries(a, a->queries, b, head, block, s->queries, s->query_rows);
    copy_queries(a, grad_out, b, head, block, s->grads, s->grad_rows);
    int64_t count = weigh(a, b, block, keys, s), n = count * TOKENS;
    score(values, s->visible, count, s->grads, s->grad_weights);
    const int32_t whole = 0;
    narrow(s->weights, n, s->narrow, s->pairs);
    for (int64_t j = 0; j < count; j++)
        multiply_add_to(TOKENS, s->narrow + j * TOKENS * R, R, &whole, 1, 0, R, s->grad_rows, W,
                        grad_values + s->visible[j] * TOKENS * W);
    float along[R] = {0}; /* the softmax's gradient: weight · (grad_weight - Σ weight · grad_weight) */
    for (int64_t c = 0; c < n; c++)
        for (int r = 0; r < R; r++) along[r] += s->weights[c * R + r] * s->grad_weights[c * R + r];
    for (int64_t c = 0; c < n; c++)
        for (int r = 0; r < R; r++)
            s->grad_weights[c * R + r] =
                s->weights[c * R + r] * (s->grad_weights[c * R + r] - along[r]);
    narrow(s->grad_weights, n, s->narrow, s->pairs);
    for (int64_t j = 0; j < count; j++)
        multiply_add_to(TOKENS, s->narrow + j * TOKENS * R, R, &whole, 1, 0, R, s->query_rows, W,
                        grad_keys + s->visible[j] * TOKENS * W);
    memset(s->sums, 0, R * W * sizeof *s->sums);
    multiply_add_to(W, turned_keys, TOKENS, s->visible, count, W * TOKENS, TOKENS, s->pairs, R,
                    s->sums);
    put_queries(a, s->sums, a->scale, b, head, block, grad_queries);
}

/* Computes the gradients of queries, keys and values from grad_out. Each gradient has the layout of
 * its input. Returns 1 if there is not enough memory. */
int attention_backward(const attention *a, const number *grad_out, number *grad_queries,
                       number *grad_keys, number *grad_values, int threads) {
    int64_t blocks = blocks_of(a), padded = blocks * TOKENS, pairs = a->batch * a->heads;
    int64_t bytes = make_room(&(room){0}, blocks, NULL), size = padded * W;
    element *keys = malloc(pairs * padded * D * sizeof *keys);
    element *values = malloc(pairs * padded * D * sizeof *values);
    element *turned = malloc(pairs * size * sizeof *turned);
    float *sums = calloc(pairs * PARTS * 2 * size, sizeof *sums); /* for keys and for values */
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        room s;
        char *memory = malloc(bytes);
        failed = !memory || !keys || !values || !turned || !sums;
        make_room(&s, blocks, memory);
#pragma omp for schedule(static)
        for (int64_t pair = 0; pair < pairs; pair++) {
            int64_t b = pair / a->heads, head = pair % a->heads;
            if (failed) continue;
            copy_head(a, a->keys, b, head, keys + pair * padded * D, turned + pair * size);
            copy_head(a, a->values, b, head, values + pair * padded * D, NULL);
        }
#pragma omp for schedule(dynamic)
        for (int64_t turn = 0; turn < pairs * PARTS; turn++) {
            int64_t pair = turn / PARTS;
            float *mine = sums + turn * 2 * size;
            for (int64_t block = turn % PARTS; block < blocks && !failed; block += PARTS)
                block_backward(a, grad_out, pair / a->heads, pair % a->heads, block,
                               keys + pair * padded * D, turned + pair * size,
                               values + pair * padded * D, &s, grad_queries, mine, mine + size);
        }
#pragma omp for schedule(static)
        for (int64_t turn = 0; turn < pairs * a->tokens; turn++) {
            int64_t pair = turn / a->tokens, t = turn % a->tokens;
            int64_t place = ((pair / a->heads * a->tokens + t) * a->heads + pair % a->heads) * D;
            for (int d = 0; d < D && !failed; d++) {
                float grad_key = 0, grad_value = 0;
                for (int part = 0; part < PARTS; part++) {
                    const float *from = sums + (pair * PARTS + part) * 2 * size + t * W + d;
                    grad_key += from[0];
                    grad_value += from[size];
                }
                grad_keys[place + d] = rounded(a->scale * grad_key);
                grad_values[place + d] = rounded(grad_value);
            }
        }
        free(memory);
    }
    free(keys);
    free(values);
    free(turned);
    free(sums);
    return failed;
}
