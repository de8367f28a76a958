/* Calls every compiled function with the same inputs, and prints the results, one number per line.
 * test_other_cpus.py compares the results of different CPUs. */
#include <stdio.h>

#include "numbers.h"

enum { ROWS = 13, IN = 70, OUT = 53, HEADS = 2, TOKENS = 37, VOCABULARY = 700 };

typedef struct {
    number *keys, *values;
    int64_t slots, tokens;
    const int64_t *slot, *length;
} segment;
typedef struct {
    int64_t rows, heads;
    segment parts[3];
} step;
typedef struct {
    const number *queries, *keys, *values;
    const uint8_t *hidden, *seen;
    int64_t batch, tokens, heads, masks;
    float scale;
} attention;

int block_columns(void);
int inputs_together(void);
void linear(const product *, int) __attribute__((weak)); /* missing on some CPUs */
int decode_attention(const step *, int64_t, float, const number *, int64_t, const number *, int64_t,
                     const number *, int64_t, number *, int);
void rotary_embedding(number *, const number *, const number *, int64_t, int64_t, int64_t, int);
void rms_norm_backward(const number *, const number *, const number *, number *, int64_t, int64_t,
                       float, int);
void silu_and_mul(const number *, const number *, number *, int64_t, int);
void silu_and_mul_backward(const number *, const number *, const number *, number *, number *,
                           int64_t, int);
int attention_forward(const attention *, number *, int);
int attention_backward(const attention *, const number *, number *, number *, number *, int);
int sample(const number *, int64_t, int64_t, float, int64_t, const double *, int64_t *, float *,
           int);
void token_logprobs(number *, int64_t, int64_t, const int64_t *, float, int64_t, float *, float *,
                    int);

/* Returns number i of a stream, in (-1, 1), which is the same on every CPU. */
static float made_up(int64_t stream, int64_t i) {
    uint32_t x = (uint32_t)(stream * 7919 + i) * 2654435761u;
    x ^= x >> 15;
    return (int32_t)(x * 2246822519u) / 2147483648.0f;
}
static number *fill(int64_t stream, int64_t n) {
    number *made = malloc(n * sizeof *made);
    for (int64_t i = 0; i < n; i++) made[i] = rounded(made_up(stream, i));
    return made;
}
static void show(const char *name, const number *from, int64_t n) {
    for (int64_t i = 0; i < n; i++) printf("%s %.9g\n", name, widened(from[i]));
}

/* Stores the weights of the matrices in the layout of products.c. */
static void products(int gated, int normed) {
    int64_t columns = block_columns(), blocks = columns ? (OUT + columns - 1) / columns : 0;
    if (!columns) return;
    int together = inputs_together(), kinds = gated ? 2 : 1;
    number *weights = calloc(blocks * kinds * IN * columns, sizeof *weights), out[ROWS * OUT];
    float *bias = calloc(blocks * kinds * columns, sizeof *bias);
    for (int kind = 0; kind < kinds; kind++)
        for (int64_t o = 0; o < OUT; o++) {
            int64_t block = o / columns * kinds + kind, column = o % columns;
            bias[block * columns + column] = made_up(9 + kind, o);
            for (int64_t i = 0; i < IN; i++)
                weights[((block * IN / together + i / together) * columns + column) * together +
                        i % together] = rounded(made_up(11 + kind, o * IN + i));
        }
    product p = {fill(1, ROWS * IN), weights, bias, fill(2, ROWS * OUT), out, ROWS, IN, OUT, gated,
                 normed, 1e-5f};
    linear(&p, 2);
    show("linear", out, ROWS * OUT);
}

static void decoding_attention(void) {
    int64_t slot[] = {0, 1}, length[] = {TOKENS, 5}, size = 2 * HEADS * WIDTH * TOKENS;
    step s = {2, HEADS, {{0}}};
    for (int i = 0; i < 3; i++)
        s.parts[i] = (segment){fill(20 + i, size), fill(30 + i, size), 2, TOKENS, slot, length};
    number out[2 * HEADS * QUERIES * WIDTH];
    decode_attention(&s, 0, 0.3f, fill(40, 2 * HEADS * QUERIES * WIDTH), HEADS * QUERIES * WIDTH,
                     fill(41, 2 * HEADS * WIDTH), HEADS * WIDTH, fill(42, 2 * HEADS * WIDTH),
                     HEADS * WIDTH, out, 2);
    show("decode_attention", out, 2 * HEADS * QUERIES * WIDTH);
}

/* The mask is causal; the last block of 16 tokens is incomplete. */
static void learning_attention(void) {
    enum { BLOCKS = (TOKENS + 15) / 16, PADDED = 16 * BLOCKS, KEYS = 2 * TOKENS * HEADS * WIDTH };
    static uint8_t hidden[PADDED * PADDED], seen[BLOCKS * BLOCKS];
    for (int key = 0; key < PADDED; key++)
        for (int query = 0; query < PADDED; query++) {
            hidden[key * PADDED + query] = key > query || query >= TOKENS;
            if (key <= query) seen[query / 16 * BLOCKS + key / 16] = 1;
        }
    attention a = {fill(50, QUERIES * KEYS), fill(51, KEYS), fill(52, KEYS), hidden, seen,
                   2, TOKENS, HEADS, 1, 0.3f};
    static number out[QUERIES * KEYS], grad_keys[KEYS], grad_values[KEYS];
    attention_forward(&a, out, 2), show("attention_forward", out, QUERIES * KEYS);
    attention_backward(&a, fill(53, QUERIES * KEYS), out, grad_keys, grad_values, 2);
    show("grad_queries", out, QUERIES * KEYS);
    show("grad_keys", grad_keys, KEYS), show("grad_values", grad_values, KEYS);
}

int main(void) {
    for (int i = 0; i < 4; i++) products(i & 1, i >> 1);
    decoding_attention();
    learning_attention();
    int64_t n = ROWS * IN, targets[ROWS], tokens[ROWS];
    number *x = fill(1, n), *y = fill(2, n), *z = fill(3, n), out[ROWS * IN], other[ROWS * IN];
    rms_norm(x, y, out, ROWS, IN, 1e-5f, 2), show("rms_norm", out, n);
    rms_norm_backward(x, y, z, out, ROWS, IN, 1e-5f, 2), show("rms_norm_backward", out, n);
    silu_and_mul(x, y, out, n, 2), show("silu_and_mul", out, n);
    silu_and_mul_backward(x, y, z, out, other, n, 2);
    show("grad_gate", out, n), show("grad_up", other, n);
    number *heads = fill(4, ROWS * HEADS * WIDTH);
    rotary_embedding(heads, fill(5, ROWS * WIDTH), fill(6, ROWS * WIDTH), ROWS, HEADS,
                     HEADS * WIDTH, 2);
    show("rotary_embedding", heads, ROWS * HEADS * WIDTH);
    number *logits = fill(7, ROWS * VOCABULARY);
    double uniform[ROWS];
    float logprobs[ROWS], entropies[ROWS];
    for (int i = 0; i < ROWS; i++) targets[i] = 50 * i, uniform[i] = (i + 0.5) / ROWS;
    sample(logits, ROWS, VOCABULARY, 0.7f, 0, uniform, tokens, logprobs, 2);
    for (int i = 0; i < ROWS; i++) printf("draw %d\nlogprob %.9g\n", (int)tokens[i], logprobs[i]);
    token_logprobs(logits, ROWS, VOCABULARY, targets, 0.7f, 1, logprobs, entropies, 2);
    for (int i = 0; i < ROWS; i++) printf("score %.9g\nentropy %.9g\n", logprobs[i], entropies[i]);
    show("gradients", logits, ROWS * VOCABULARY);
    return 0;
}
