/* The tile instructions of AMX in plain C, for tests on a CPU without them; -include compiles this file
 * before products.c. The instructions follow the Intel 64 and IA-32 Architectures Software Developer's
 * Manual. The process ends where the CPU would raise an exception. */
#pragma once
#include <immintrin.h> /* before the names are redefined */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig stand_in_loadconfig
#define _tile_release stand_in_release

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_configuration;

static _Thread_local tile_configuration tile_shape;
static _Thread_local union {
    float sums[16];
    uint16_t numbers[32];
} tile_data[8][16];

static void require(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "tiles: %s\n", what);
    abort();
}
static void require_tile(int i) {
    require(tile_shape.palette == 1, "none are configured");
    require(i >= 0 && i < 8 && tile_shape.rows[i] && tile_shape.bytes[i], "this one has no shape");
}

static inline int may_use_tiles(void) { return 1; }

static __attribute__((noinline, unused)) void _tile_loadconfig(const void *from) {
    tile_configuration shape;
    memcpy(&shape, from, sizeof shape);
    require(shape.palette == 1 && !shape.start, "no such palette or row to start with");
    for (int i = 0; i < 14; i++) require(!shape.reserved[i], "reserved bytes of a shape");
    for (int i = 0; i < 16; i++) {
        require(shape.rows[i] <= 16 && shape.bytes[i] <= 64, "a tile is too large");
        require(i < 8 || !(shape.rows[i] | shape.bytes[i]), "there are eight tiles");
        require(!shape.rows[i] == !shape.bytes[i], "a tile has rows or bytes alone");
    }
    tile_shape = shape;
    memset(tile_data, 0, sizeof tile_data);
}
static inline void _tile_release(void) { memset(&tile_shape, 0, sizeof tile_shape); }
static inline void _tile_zero(int i) {
    require_tile(i);
    memset(tile_data[i], 0, sizeof tile_data[i]);
}
static inline void _tile_loadd(int i, const void *from, int64_t stride) {
    _tile_zero(i);
    for (int row = 0; row < tile_shape.rows[i]; row++)
        memcpy(&tile_data[i][row], (const char *)from + row * stride, tile_shape.bytes[i]);
}
static inline void _tile_stored(int i, void *to, int64_t stride) {
    require_tile(i);
    for (int row = 0; row < tile_shape.rows[i]; row++)
        memcpy((char *)to + row * stride, &tile_data[i][row], tile_shape.bytes[i]);
}

/* Denormal inputs and results count as zero. */
static inline float tile_flush(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }
static inline float tile_number(uint16_t bf16) {
    uint32_t bits = (uint32_t)bf16 << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return tile_flush(x);
}

/* Computes sums += rows · weights. The first and the second numbers of the pairs are summed separately,
 * then added to each other, and then to the sums. */
static __attribute__((noinline, unused)) void tile_multiply(int sums, int rows, int weights) {
    require_tile(sums), require_tile(rows), require_tile(weights);
    require(sums != rows && sums != weights && rows != weights, "one tile is named twice");
    require(tile_shape.rows[sums] == tile_shape.rows[rows], "sums and rows differ in rows");
    require(tile_shape.bytes[sums] == tile_shape.bytes[weights], "sums and weights differ in width");
    require(tile_shape.bytes[rows] == 4 * tile_shape.rows[weights], "rows and weights do not fit");
    for (int i = 0; i < tile_shape.rows[sums]; i++) {
        float first[16] = {0}, second[16] = {0}, *sum = tile_data[sums][i].sums;
        int columns = tile_shape.bytes[sums] / 4;
        for (int k = 0; k < tile_shape.rows[weights]; k++) {
            const uint16_t *x = tile_data[rows][i].numbers + 2 * k;
            const uint16_t *weight = tile_data[weights][k].numbers;
            for (int j = 0; j < columns; j++) { /* the product of two bf16 numbers is exact in fp32 */
                first[j] = tile_flush(first[j] + tile_number(x[0]) * tile_number(weight[2 * j]));
                second[j] = tile_flush(second[j] + tile_number(x[1]) * tile_number(weight[2 * j + 1]));
            }
        }
        for (int j = 0; j < columns; j++)
            sum[j] = tile_flush(tile_flush(sum[j]) + tile_flush(first[j] + second[j]));
    }
}
#define _tile_dpbf16ps(sums, rows, weights) tile_multiply(sums, rows, weights)
