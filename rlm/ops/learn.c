/* The operations between the matmuls of a training pass: norms (also those of a decoding step),
 * gating, and their gradients. The backward pass recomputes the intermediate results of the forward
 * pass.
 */
#include "numbers.h"

/* Computes out = weight · x / rms(x), where x and out are (rows, width) and may be the same memory. If
 * the weight is NULL, it counts as 1. As in transformers, x / rms(x) is rounded first. */
void rms_norm(const number *x, const number *weight, number *out, int64_t rows, int64_t width,
              float epsilon, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const number *from = x + row * width;
        number *to = out + row * width;
        float factor = inverse_rms(from, width, epsilon);
        for (int64_t i = 0; i < width; i++) {
            float by = weight ? widened(weight[i]) : 1;
            to[i] = rounded(by * widened(rounded(widened(from[i]) * factor)));
        }
    }
}

/* Computes the gradient of x from grad_out: f (g - x f^2 mean(g x)), with f = 1 / rms(x) and
 * g = weight · grad_out. */
void rms_norm_backward(const number *x, const number *weight, const number *grad_out,
                       number *grad_x, int64_t rows, int64_t width, float epsilon, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const number *from = x + row * width, *grad = grad_out + row * width;
        number *to = grad_x + row * width;
        float factor = inverse_rms(from, width, epsilon), along = 0;
#pragma omp simd reduction(+ : along)
        for (int64_t i = 0; i < width; i++)
            along += widened(weight[i]) * widened(grad[i]) * widened(from[i]);
        float share = along / width * factor * factor;
        for (int64_t i = 0; i < width; i++)
            to[i] =
                rounded(factor * (widened(weight[i]) * widened(grad[i]) - widened(from[i]) * share));
    }
}

/* Computes out = silu(gate) · up. */
void silu_and_mul(const number *gate, const number *up, number *out, int64_t n, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (int64_t i = 0; i < n; i++)
        out[i] = rounded(widened(rounded(silu_of(widened(gate[i])))) * widened(up[i]));
}

/* Computes the gradients of gate and up. If s is the logistic function of the gate, then
 * silu' = s + silu (1 - s). */
void silu_and_mul_backward(const number *gate, const number *up, const number *grad_out,
                           number *grad_gate, number *grad_up, int64_t n, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (int64_t i = 0; i < n; i++) {
        float g = widened(gate[i]), grad = widened(grad_out[i]);
        float power = power_of_two(-fabsf(g) * LOG2_E), s = (g < 0 ? power : 1) / (1 + power);
        grad_gate[i] = rounded(grad * widened(up[i]) * (s + g * s * (1 - s)));
        grad_up[i] = rounded(grad * g * s);
    }
}
