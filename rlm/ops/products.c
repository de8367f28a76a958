/* The matmuls of the fast path, for CPUs with fused multiply-add (x86 from AVX2 on, ARM); compiled
 * by cpu.py. In bf16, CPUs with AVX512-BF16 multiply pairs of numbers, and CPUs with AMX multiply
 * whole tiles; on other CPUs, numbers are widened to fp32 when they are read.
 *
 * With 64 rows, multiplying a block of weights takes about as long as loading the block from
 * memory, and oneDNN first loads and then multiplies. Here the next block is prefetched while the
 * current block is multiplied. RMS norm, bias, SiLU gating and residual are applied to the sums
 * before they are rounded.
 *
 * Every sum is computed in the order of its inputs, so the result of a row depends neither on the
 * other rows nor on the number of threads.
 */
#include "numbers.h"

#ifdef MATMULS

enum {
#ifdef TILES
    ROWS = 32,    /* rows multiplied at a time */
    VECTOR = 16,  /* numbers in a row of a tile */
    VECTORS = 2,  /* tiles of sums per row */
    DEPTH = 32,   /* inputs that are multiplied at a time */
    TOGETHER = 2, /* inputs whose weights are adjacent */
#else
    ROWS = VECTOR_ROWS,
    VECTOR = LANES,
    VECTORS = 3,
    DEPTH = 4 / sizeof(element),
    TOGETHER = DEPTH,
#endif
    COLUMNS = VECTOR * VECTORS,
    WORDS = COLUMNS * DEPTH,       /* weights of DEPTH inputs in a block */
    LINE = 64 / sizeof(number),    /* numbers in a cache line */
    TASKS = 4, /* minimum tasks per thread if there are enough rows, so threads wait less */
};

/* The next block of weights, which is prefetched a few inputs at a time. */
typedef struct {
    const number *weights;
    int64_t every, wait; /* turns between prefetches, and turns until the next one */
} request;

static inline void ask(request *next) {
    if (--next->wait) return;
    for (int j = 0; j < WORDS; j += LINE) __builtin_prefetch(next->weights + j, 0, 2);
    next->weights += WORDS;
    next->wait = next->every;
}

#ifdef TILES
#ifndef _tile_dpbf16ps
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Linux allows a process to use tiles only after a request:
 * arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA). */
static int may_use_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#endif

int block_columns(void) { return may_use_tiles() ? COLUMNS : 0; }
int inputs_together(void) { return TOGETHER; }

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16]; /* bytes per row */
    uint8_t rows[16];
} tile_shapes;

/* Prevents GCC from delaying earlier stores, as GCC does not know what tile instructions read. */
static inline void written(const void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

/* Configures the tiles. Tiles 0 to 3 contain the sums of 2 · 16 rows and 2 · 16 columns, tiles 4
 * and 5 contain rows, and tiles 6 and 7 contain weights. */
static void shape_tiles(int64_t rows) {
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        int64_t first = i < 4 ? i / 2 * 16 : i < 6 ? (i - 4) * 16 : 0;
        int64_t left = i < 6 ? rows - first : 16; /* a tile of weights has 16 pairs of inputs */
        if (left <= 0) continue;
        shapes.rows[i] = left < 16 ? left : 16;
        shapes.bytes[i] = 64;
    }
    written(&shapes);
    _tile_loadconfig(&shapes);
}

/* Releases the tiles, because context switches of a thread with tiles in use are slower. */
static inline void release_tiles(void) { _tile_release(); }

/* Adds the products of DEPTH inputs to the sums. x is (rows, DEPTH), and its rows are `width` bytes
 * apart. */
static inline __attribute__((always_inline)) void
add_products(const int two, const number *x, int64_t width, const number *weights) {
    _tile_loadd(6, weights, 4 * COLUMNS);
    _tile_loadd(4, x, width);
    _tile_loadd(7, weights + VECTOR * TOGETHER, 4 * COLUMNS);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
        _tile_loadd(5, (const char *)x + 16 * width, width);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* Computes sums[i][j] = x[i] · weights[:, j] for the rows for which the tiles are configured; these
 * are more than 16 rows if `two`. The weights are (inputs / TOGETHER, COLUMNS, TOGETHER). */
static inline __attribute__((always_inline)) void
multiply_rows(const int two, int64_t rows, const number *x, const number *weights, int64_t inputs,
              request *next, float sums[ROWS][COLUMNS]) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    int64_t whole = inputs / DEPTH * DEPTH, rest = inputs - whole;
    for (int64_t k = 0; k < whole; k += DEPTH) {
        ask(next);
        add_products(two, x + k, inputs * sizeof *x, weights + k * COLUMNS);
    }
    if (rest) { /* pad the last tile with zeros */
        number last[ROWS][DEPTH] = {{0}}, last_weights[WORDS] = {0};
        for (int64_t i = 0; i < rows; i++)
            memcpy(last[i], x + i * inputs + whole, rest * sizeof *x);
        memcpy(last_weights, weights + whole * COLUMNS, rest * COLUMNS * sizeof *weights);
        written(last);
        written(last_weights);
        add_products(two, last[0], sizeof last[0], last_weights);
    }
    _tile_stored(0, sums[0], 4 * COLUMNS);
    _tile_stored(1, sums[0] + VECTOR, 4 * COLUMNS);
    if (two) {
        _tile_stored(2, sums[16], 4 * COLUMNS);
        _tile_stored(3, sums[16] + VECTOR, 4 * COLUMNS);
    }
}

static void multiply_tile(int64_t rows, const number *x, const number *weights, int64_t inputs,
                          request *next, float sums[ROWS][COLUMNS]) {
    if (rows > 16) multiply_rows(1, rows, x, weights, inputs, next, sums);
    else multiply_rows(0, rows, x, weights, inputs, next, sums);
}

#else
int block_columns(void) { return COLUMNS; }
int inputs_together(void) { return TOGETHER; }

/* Without AMX there are no tiles to configure or release. */
static inline void shape_tiles(int64_t rows) { (void)rows; }
static inline void release_tiles(void) {}

#ifdef __AVX2__
#include <immintrin.h>
#endif
static inline operand weights_at(const void *weights) {
#ifdef PAIRS
    return (operand)_mm512_loadu_si512(weights);
#elif defined(BF16) && defined(__AVX512F__)
    return (operand)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(weights)), 16);
#elif defined(BF16) && defined(__AVX2__) /* GCC's own code needs five instructions */
    return (operand)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(weights)), 16);
#elif defined(BF16)
    typedef number numbers __attribute__((vector_size(2 * LANES)));
    typedef numbers stored_numbers __attribute__((aligned(2), may_alias));
    typedef uint32_t words __attribute__((vector_size(4 * LANES)));
    return (operand)(__builtin_convertvector(*(const stored_numbers *)weights, words) << 16);
#else
    return *(const stored_floats *)weights;
#endif
}

/* Computes sums[i][j] = x[i] · weights[:, j] for the first `rows` rows (a constant). The weights
 * are (inputs / TOGETHER, COLUMNS, TOGETHER). */
static inline __attribute__((always_inline)) void
tile(const int rows, const element *x, const number *weights, int64_t inputs, request *next,
     float sums[ROWS][COLUMNS]) {
    floats sum[ROWS][VECTORS]; /* in registers */
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < VECTORS; j++) sum[i][j] = (floats){0};
    for (int64_t k = 0; k < inputs; k += TOGETHER) {
        operand weight[VECTORS];
        for (int j = 0; j < VECTORS; j++)
            weight[j] = weights_at(weights + k * COLUMNS + j * LANES * TOGETHER);
        ask(next);
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
    const element *read = (const element *)x;
    float wide[sizeof(element) > sizeof(number) ? ROWS * inputs : 1];
    if (sizeof(element) > sizeof(number)) {
#pragma omp simd
        for (int64_t i = 0; i < rows * inputs; i++) wide[i] = widened(x[i]);
        read = (const element *)wide;
    }
    switch (rows) { /* a constant number of rows keeps the sums in registers */
    case 1: return tile(1, read, weights, inputs, next, sums);
    case 2: return tile(2, read, weights, inputs, next, sums);
    case 3: return tile(3, read, weights, inputs, next, sums);
#if VECTOR_ROWS > 4
    case 4: return tile(4, read, weights, inputs, next, sums);
    case 5: return tile(5, read, weights, inputs, next, sums);
    case 6: return tile(6, read, weights, inputs, next, sums);
    case 7: return tile(7, read, weights, inputs, next, sums);
#endif
    default: return tile(ROWS, read, weights, inputs, next, sums);
    }
}
#endif

static inline void scale_and_shift(float *sums, float factor, const float *bias) {
    for (int j = 0; j < COLUMNS; j++) sums[j] *= factor;
    if (bias)
        for (int j = 0; j < COLUMNS; j++) sums[j] += bias[j];
}

/* Computes the rows from `from` up to, but not including, `to` for a block of columns. */
static void multiply_block(const product *p, int64_t block, int64_t from, int64_t to,
                           const float *factors, const number *next) {
    int64_t size = p->inputs * COLUMNS, kinds = p->gated ? 2 : 1, column = block * COLUMNS;
    int64_t width = p->outputs - column < COLUMNS ? p->outputs - column : COLUMNS;
    const number *weights = p->weights + block * kinds * size;
    const float *bias = p->bias ? p->bias + block * kinds * COLUMNS : NULL;
    int64_t tiles = (to - from + ROWS - 1) / ROWS;
    request ahead = {next, tiles, 1};
    int64_t shaped = 0; /* number of rows for which the tiles are configured */
    for (int64_t row = from; row < to; row += ROWS) {
        float sums[ROWS][COLUMNS], gates[ROWS][COLUMNS];
        int64_t rows = to - row < ROWS ? to - row : ROWS;
        const number *x = p->x + row * p->inputs;
        if (rows != shaped) shape_tiles(shaped = rows);
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

void linear(const product *p, int threads) {
    int64_t blocks = (p->outputs + COLUMNS - 1) / COLUMNS, tiles = (p->rows + ROWS - 1) / ROWS;
    int64_t block_size = p->inputs * COLUMNS * (p->gated ? 2 : 1);
    int64_t parts = (TASKS * threads + blocks - 1) / blocks; /* number of parts of the rows */
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
        release_tiles();
    }
}

#else
int block_columns(void) { return 0; } /* no matmuls are compiled */
int inputs_together(void) { return 1; }
#endif
