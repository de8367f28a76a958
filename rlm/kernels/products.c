/* The matrix products of the fast path, for CPUs with fused multiply-add (x86 from AVX2 on, ARM) and,
 * in bf16, for those that multiply pairs (AVX512-BF16); compiled by build.py.
 *
 * With 64 rows a block of the weights is multiplied for about as long as it takes to come from
 * memory, and oneDNN does the one after the other. Here, while one block is multiplied, the next is
 * asked for. What surrounds a product is done to its sums before they are rounded: the norm of the
 * rows, bias, SiLU gating, residual.
 *
 * Every sum is taken in the order of its inputs, so a row's result depends neither on the other
 * rows nor on the number of threads.
 */
#include "numbers.h"

/* CPUs with matrix tiles (AMX) are left to oneDNN in bf16, which uses them. */
#if (defined(BF16) && defined(__AVX512BF16__) && !defined(__AMX_BF16__)) || \
    (!defined(BF16) && (defined(__FMA__) || defined(__ARM_FEATURE_FMA)))

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8
#elif defined(__AVX__)
#define LANES 8
#define ROWS 4 /* for 16 registers, where the others have 32 */
#else
#define LANES 4
#define ROWS 8
#endif

enum {
    VECTORS = 3, /* of sums a row */
    COLUMNS = LANES * VECTORS,
    TOGETHER = 4 / sizeof(number), /* inputs that are multiplied at a time */
    WORDS = COLUMNS * TOGETHER,    /* numbers of a block that they meet */
    LINE = 64 / sizeof(number),    /* numbers that memory hands over at a time */
    TASKS = 4, /* per thread at least, if there are rows enough: then no thread waits long */
};

typedef float floats __attribute__((vector_size(4 * LANES)));

#ifdef BF16
#include <immintrin.h>
typedef __m512bh operand;

static inline operand same(const number *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (operand)_mm512_set1_epi32(pair);
}
static inline floats multiply_add(floats sum, operand x, operand weights) {
    return _mm512_dpbf16_ps(sum, x, weights);
}
#else
typedef floats operand;

static inline operand same(const number *x) { return *x - (floats){0}; }
static inline floats multiply_add(floats sum, operand x, operand weights) {
    return sum + x * weights;
}
#endif
typedef floats stored_floats __attribute__((aligned(4), may_alias));
typedef operand stored_operand __attribute__((aligned(4), may_alias));

int block_columns(void) { return COLUMNS; }

/* The block of weights that will be multiplied next, asked for a few inputs at a time. */
typedef struct {
    const number *weights;
    int64_t every, wait; /* once in so many turns, and the turns until then */
} request;

/* sums[i][j] = x[i] · weights[:, j] for the first `rows`, a constant; weights (inputs / TOGETHER,
 * COLUMNS, TOGETHER). */
static inline __attribute__((always_inline)) void
tile(const int rows, const number *x, const number *weights, int64_t inputs, request *next,
     float sums[ROWS][COLUMNS]) {
    floats sum[ROWS][VECTORS]; /* in registers */
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < VECTORS; j++) sum[i][j] = (floats){0};
    for (int64_t k = 0; k < inputs; k += TOGETHER) {
        operand weight[VECTORS];
        for (int j = 0; j < VECTORS; j++)
            weight[j] = *(const stored_operand *)(weights + k * COLUMNS + j * LANES * TOGETHER);
        if (--next->wait == 0) {
            for (int j = 0; j < WORDS; j += LINE) __builtin_prefetch(next->weights + j, 0, 2);
            next->weights += WORDS;
            next->wait = next->every;
        }
        for (int i = 0; i < rows; i++) {
            operand one = same(x + i * inputs + k);
            for (int j = 0; j < VECTORS; j++) sum[i][j] = multiply_add(sum[i][j], one, weight[j]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < VECTORS; j++) *(stored_floats *)(sums[i] + j * LANES) = sum[i][j];
}

static void multiply_tile(int64_t rows, const number *x, const number *weights, int64_t inputs,
                          request *next, float sums[ROWS][COLUMNS]) {
    switch (rows) { /* each with its registers */
    case 1: return tile(1, x, weights, inputs, next, sums);
    case 2: return tile(2, x, weights, inputs, next, sums);
    case 3: return tile(3, x, weights, inputs, next, sums);
#if ROWS > 4
    case 4: return tile(4, x, weights, inputs, next, sums);
    case 5: return tile(5, x, weights, inputs, next, sums);
    case 6: return tile(6, x, weights, inputs, next, sums);
    case 7: return tile(7, x, weights, inputs, next, sums);
#endif
    default: return tile(ROWS, x, weights, inputs, next, sums);
    }
}

static inline void scale_and_shift(float *sums, float factor, const float *bias) {
    for (int j = 0; j < COLUMNS; j++) sums[j] *= factor;
    if (bias)
        for (int j = 0; j < COLUMNS; j++) sums[j] += bias[j];
}

/* What is multiplied: x (rows, inputs); weights (blocks, inputs / TOGETHER, COLUMNS, TOGETHER) and,
 * if there is one, bias (blocks, COLUMNS), each twice as many blocks if `gated`: of the gate and of what it
 * gates in turn. If `normed`, x counts as divided by its root mean square. Added, if there is one:
 * residual (rows, outputs). Into out (rows, outputs). */
typedef struct {
    const number *x, *weights;
    const float *bias;
    const number *residual;
    number *out;
    int64_t rows, inputs, outputs;
    int64_t gated, normed;
    float epsilon;
} product;

/* Rows from…to of a block. */
static void multiply_block(const product *p, int64_t block, int64_t from, int64_t to,
                           const float *factors, const number *next) {
    int64_t size = p->inputs * COLUMNS, kinds = p->gated ? 2 : 1, column = block * COLUMNS;
    int64_t width = p->outputs - column < COLUMNS ? p->outputs - column : COLUMNS;
    const number *weights = p->weights + block * kinds * size;
    const float *bias = p->bias ? p->bias + block * kinds * COLUMNS : NULL;
    int64_t tiles = (to - from + ROWS - 1) / ROWS;
    request ahead = {next, tiles, 1};
    for (int64_t row = from; row < to; row += ROWS) {
        float sums[ROWS][COLUMNS], gates[ROWS][COLUMNS];
        int64_t rows = to - row < ROWS ? to - row : ROWS;
        const number *x = p->x + row * p->inputs;
        if (p->gated) multiply_tile(rows, x, weights, p->inputs, &ahead, gates);
        multiply_tile(rows, x, weights + (kinds - 1) * size, p->inputs, &ahead, sums);
        for (int64_t i = 0; i < rows; i++) {
            float factor = p->normed ? factors[row + i] : 1;
            int64_t place = (row + i) * p->outputs + column;
            scale_and_shift(sums[i], factor, bias ? bias + (kinds - 1) * COLUMNS : NULL);
            if (p->gated) {
                scale_and_shift(gates[i], factor, bias);
                for (int j = 0; j < COLUMNS; j++) sums[i][j] *= silu_of(gates[i][j]);
            }
            if (p->residual)
                for (int j = 0; j < width; j++) sums[i][j] += widened(p->residual[place + j]);
            for (int j = 0; j < width; j++) p->out[place + j] = rounded(sums[i][j]);
        }
    }
}

void multiply(const product *p, int threads) {
    int64_t blocks = (p->outputs + COLUMNS - 1) / COLUMNS, tiles = (p->rows + ROWS - 1) / ROWS;
    int64_t block_size = p->inputs * COLUMNS * (p->gated ? 2 : 1);
    int64_t parts = (TASKS * threads + blocks - 1) / blocks; /* of the rows */
    parts = parts < tiles ? parts : tiles;
    float factors[p->normed ? p->rows : 1];
#pragma omp parallel num_threads(threads)
    {
        if (p->normed)
#pragma omp for schedule(static)
            for (int64_t row = 0; row < p->rows; row++)
                factors[row] = inverse_rms(p->x + row * p->inputs, p->inputs, p->epsilon);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < blocks * parts; task++) {
            int64_t part = task % parts, next = (task + 1) / parts;
            next = next < blocks ? next : blocks - 1;
            int64_t from = tiles * part / parts * ROWS, to = tiles * (part + 1) / parts * ROWS;
            multiply_block(p, task / parts, from, to < p->rows ? to : p->rows, factors,
                           p->weights + next * block_size);
        }
    }
}

#else
int block_columns(void) { return 0; } /* there are none */
#endif
