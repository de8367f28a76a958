/* Defines the dtype of all compiled code, and functions that several files use.
 *
 * Numbers are stored in fp32, or with -DBF16 in bf16. Arithmetic is in fp32 or wider.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static const float LOG2_E = 1.44269504f; /* e^x = 2^(x log2 e) */
static const int64_t WORTH_THREADS = 16384; /* threads cost more than they save for fewer numbers */

#ifdef BF16
typedef uint16_t number;

static inline float widened(number x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}
static inline number rounded(float x) { /* rounds to nearest, ties to even; a NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
typedef float number;

static inline float widened(number x) { return x; }
static inline number rounded(float x) { return x; }
#endif

static const float NOTHING = -150; /* 2 to this power is 0 in fp32 */

/* Returns 2^x for x <= 0, with a relative error of 2e-7: the power of the nearest integer, times a
 * series for the rest. */
static inline float power_of_two(float x) {
    int32_t whole = (int32_t)(x - 0.5f), exponent = whole + 127;
    float rest = x - whole;
    float series = 1 + rest * (0.69314718f + rest * (0.24022651f + rest * (0.05550411f +
                   rest * (0.00961813f + rest * (0.00133336f + rest * 0.00015404f)))));
    uint32_t bits = (uint32_t)(exponent > 0 ? exponent : 0) << 23; /* 0 for powers below 2^-126 */
    float power;
    memcpy(&power, &bits, sizeof power);
    return series * power; /* a NaN stays NaN */
}

/* Returns x times the logistic function of x. */
static inline float silu_of(float x) {
    float power = power_of_two(-fabsf(x) * LOG2_E);
    return x * (x < 0 ? power : 1) / (1 + power);
}

/* Returns 1 / rms(x), with epsilon added to the mean square. */
static inline float inverse_rms(const number *x, int64_t width, float epsilon) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += widened(x[i]) * widened(x[i]);
    return 1 / sqrtf(sum / width + epsilon);
}

/* bf16 matmuls use AMX tiles if the CPU has them. Tests emulate the tile instructions with macros. */
#if defined(BF16) && (defined(__AMX_BF16__) || defined(_tile_dpbf16ps))
#define TILES
#endif

#if defined(TILES) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define MATMULS /* products.c contains matmuls for this CPU */
#endif

/* The vectors of attention.c and products.c. LANES is the number of floats in a vector, and
 * VECTOR_ROWS the number of rows whose sums fit into the registers. */
#if defined(__AVX512F__)
#define LANES 16
#define VECTOR_ROWS 8
#elif defined(__AVX__)
#define LANES 8
#define VECTOR_ROWS 4 /* AVX has 16 registers; AVX-512 and NEON have 32 */
#else
#define LANES 4
#define VECTOR_ROWS 8
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef floats stored_floats __attribute__((aligned(4), may_alias));

/* In bf16, pairs of numbers are multiplied if the CPU has a fast instruction for pairs. This
 * instruction is slow on CPUs with AMX tiles. On these CPUs, and on CPUs without the instruction,
 * numbers are widened to fp32 before they are multiplied. */
#if defined(BF16) && defined(__AVX512BF16__) && !defined(TILES)
#include <immintrin.h>
#define PAIRS
typedef number element;
typedef __m512bh operand;

static inline operand same(const element *x) { /* a vector of copies of one pair */
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (operand)_mm512_set1_epi32(pair);
}
static inline floats multiply_add(floats sum, operand x, operand y) {
    return _mm512_dpbf16_ps(sum, x, y);
}
#else
typedef float element;
typedef stored_floats operand;

static inline operand same(const element *x) { return *x - (floats){0}; }
static inline floats multiply_add(floats sum, operand x, operand y) { return sum + x * y; }
#endif

/* One matmul of x (rows, inputs) and weights (blocks, inputs / TOGETHER, COLUMNS, TOGETHER), with
 * an optional bias (blocks, COLUMNS). If `gated`, there are twice as many blocks: each block of the
 * gate is followed by the block that it gates. If `normed`, each row of x is divided by its root
 * mean square. An optional residual (rows, outputs), which may be `out` itself, is added. The
 * result is stored in out (rows, outputs). */
typedef struct {
    const number *x, *weights;
    const float *bias;
    const number *residual;
    number *out;
    int64_t rows, inputs, outputs;
    int64_t gated, normed;
    float epsilon;
} product;

void linear(const product *p, int threads); /* only with MATMULS */

/* See learn.c; `out` may be x itself. */
void rms_norm(const number *x, const number *weight, number *out, int64_t rows, int64_t width,
              float epsilon, int threads);
