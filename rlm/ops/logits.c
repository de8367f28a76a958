/* Sampling from logits and scoring of tokens. Both functions read the logits two or three times
 * while the logits are in the CPU's cache, and neither allocates a buffer of the size of the
 * logits.
 */
#include "numbers.h"

#ifndef DRAWN /* tokens in a block of the vocabulary: VOCAB_BLOCK in torch_ops.py */
#error "-DDRAWN is missing"
#endif

static float highest(const number *from, int64_t n) {
    float most = widened(from[0]);
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < n; i++) most = widened(from[i]) > most ? widened(from[i]) : most;
    return most;
}

/* Computes the exponents of 2 of a block, (logit - most) · factor. Exponents beyond the vocabulary
 * are NOTHING. */
static void exponents(const number *logits, int64_t vocabulary, int64_t block, float most,
                      float factor, float out[DRAWN]) {
    const number *from = logits + block * DRAWN;
    int64_t left = vocabulary - block * DRAWN, n = left < DRAWN ? left : DRAWN;
    for (int64_t i = 0; i < n; i++) {
        float exponent = (widened(from[i]) - most) * factor;
        out[i] = exponent < NOTHING ? NOTHING : exponent; /* a NaN stays NaN */
    }
    for (int64_t i = n; i < DRAWN; i++) out[i] = NOTHING;
}

/* Computes the powers of two of a block, and returns the sum of these powers. */
static float masses(const number *logits, int64_t vocabulary, int64_t block, float most,
                    float factor, float powers[DRAWN]) {
    exponents(logits, vocabulary, block, most, factor, powers);
    for (int64_t i = 0; i < DRAWN; i++) powers[i] = power_of_two(powers[i]);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < DRAWN; i++) sum += powers[i];
    return sum;
}

/* Returns the index of the first mass with which the running sum exceeds `wanted`, and sets
 * `before` to the sum before this mass. If rounding makes `wanted` equal the total, the index is
 * that of the last mass above 0. */
static int64_t hit(const double *mass, int64_t n, double wanted, double *before) {
    int64_t last = 0;
    double sum = *before;
    for (int64_t i = 0; i < n && sum <= wanted; i++)
        if (mass[i] > 0) {
            last = i;
            *before = sum;
            sum += mass[i];
        }
    return last;
}

/* Samples a token from each row of logits (rows, vocabulary), and computes its log-probability. The
 * method is that of torch_ops.py: the running sum over blocks of the vocabulary selects a block,
 * and the running sum inside this block selects the token. If `greedy`, the first of the most likely
 * tokens is selected. A logit of -inf is valid. Returns 1 if a row has a logit of NaN or +inf, or
 * only logits of -inf. */
int sample(const number *logits, int64_t rows, int64_t vocabulary, float temperature,
           int64_t greedy, const double *uniform, int64_t *tokens, float *logprobs, int threads) {
    int64_t blocks = (vocabulary + DRAWN - 1) / DRAWN;
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : failed)
    for (int64_t row = 0; row < rows; row++) {
        const number *from = logits + row * vocabulary;
        float most = highest(from, vocabulary), powers[DRAWN], factor = LOG2_E / temperature;
        double sums[blocks], total = 0; /* double: float would distort rare tokens */
        for (int64_t b = 0; b < blocks; b++)
            total += sums[b] = masses(from, vocabulary, b, most, factor, powers);
        int64_t token = 0;
        if (greedy)
            while (widened(from[token]) < most) token++;
        else {
            double wanted = uniform[row] * total, before = 0;
            int64_t b = hit(sums, blocks, wanted, &before);
            masses(from, vocabulary, b, most, factor, powers);
            double inside[DRAWN];
            for (int i = 0; i < DRAWN; i++) inside[i] = powers[i];
            token = b * DRAWN + hit(inside, DRAWN, wanted, &before);
        }
        tokens[row] = token;
        logprobs[row] = (widened(from[token]) - most) / temperature - log(total);
        failed |= !isfinite(total);
    }
    return failed;
}

/* Computes the log-probability of each row's target under softmax(logits / temperature), and the
 * entropy of that distribution. With `gradients`, the logits (rows, vocabulary) are overwritten
 * with the log-probability's gradient times the temperature: 1[v = target] - p_v, rounded once. */
void token_logprobs(number *logits, int64_t rows, int64_t vocabulary, const int64_t *targets,
                    float temperature, int64_t gradients, float *logprobs, float *entropies,
                    int threads) {
    int64_t blocks = (vocabulary + DRAWN - 1) / DRAWN;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        number *from = logits + row * vocabulary, *target = from + targets[row];
        float most = highest(from, vocabulary), factor = LOG2_E / temperature, powers[DRAWN];
        double total = 0, moment = 0; /* the sums of masses, and of masses times exponents */
        for (int64_t b = 0; b < blocks; b++) {
            exponents(from, vocabulary, b, most, factor, powers);
            float sum = 0, first = 0;
#pragma omp simd reduction(+ : sum, first)
            for (int64_t i = 0; i < DRAWN; i++) {
                float power = power_of_two(powers[i]);
                sum += power;
                first += power * powers[i];
            }
            total += sum;
            moment += first;
        }
        logprobs[row] = (widened(*target) - most) / temperature - log(total);
        entropies[row] = log(total) - moment / total / LOG2_E;
        float share = 1 / total;
        for (int64_t b = 0; gradients && b < blocks; b++) {
            int64_t left = vocabulary - b * DRAWN, n = left < DRAWN ? left : DRAWN;
            masses(from, vocabulary, b, most, factor, powers);
            for (int64_t i = 0; i < n; i++) from[b * DRAWN + i] = rounded(-powers[i] * share);
        }
        if (gradients) *target = rounded(-expm1f(logprobs[row]));
    }
}
