// The cross entropy of rows of logits and its gradient, without a float32 copy of the logits.
//
// Sums of a row are float32: element i is added to lane i mod 16, in ascending order of i; then `total` adds the lanes.
#include <math.h>
#include "parallel.h"
#include "vector.h"

namespace fb {
namespace {

// Return −log softmax(x)[target] and store log Σ e^x, both rounded once from double.
template <class T> float entropy_row(const T *x, int64_t cols, int64_t target, float *log_sum) {
  F32x16 most = all(-INFINITY), sum = {};
  each_vector(
      cols, [&](int64_t i, auto lanes) FB_INLINED { most = larger(most, keep(load(x + i, lanes), lanes, -INFINITY)); });
  const float top = largest(most);
  each_group(cols, [&](int64_t i, auto lanes, auto count) FB_INLINED {
    constexpr int N = count;
    F32x16 e[N];
    each<N>([&](int k) FB_INLINED { e[k] = load(x + i + k * LANES, lanes) - top; });
    exponentials(e);
    each<N>([&](int k) FB_INLINED { sum += keep(e[k], lanes); });
  });
  const double logarithm = log(double(total(sum)));
  *log_sum = float(double(top) + logarithm);
  return float((double(top) - double(first(load(x + target, First{1})))) + logarithm);
}

// dx = (softmax(x) − one hot) · scale; dx may be x.
template <class T>
void entropy_row_backward(const T *x, int64_t cols, int64_t target, float log_sum, float scale, T *dx) {
  const F32x16 right = (exponential(load(x + target, First{1}) - log_sum) - 1.0f) * scale;
  each_group(cols, [&](int64_t i, auto lanes, auto count) FB_INLINED {
    constexpr int N = count;
    F32x16 e[N];
    each<N>([&](int k) FB_INLINED { e[k] = load(x + i + k * LANES, lanes) - log_sum; });
    exponentials(e);
    each<N>([&](int k) FB_INLINED { store(dx + i + k * LANES, e[k] * scale, lanes); });
  });
  store(dx + target, right, First{1});
}

template <class T>
void entropy(const T *x, int64_t rows, int64_t cols, const int64_t *targets, int64_t ignored, float *losses,
             float *log_sums, int threads) {
  in_parallel(rows, threads, [&](int64_t count) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < count; r++)
      losses[r] =
          targets[r] == ignored ? (log_sums[r] = 0.0f) : entropy_row(x + r * cols, cols, targets[r], log_sums + r);
  });
}

template <class T>
void entropy_backward(const T *x, int64_t rows, int64_t cols, const int64_t *targets, int64_t ignored,
                      const float *log_sums, const float *scales, T *dx, int threads) {
  in_parallel(rows, threads, [&](int64_t count) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < count; r++)
      if (targets[r] == ignored)
        memset(dx + r * cols, 0, size_t(cols) * sizeof(T));
      else
        entropy_row_backward(x + r * cols, cols, targets[r], log_sums[r], scales[r], dx + r * cols);
  });
}

}  // namespace
}  // namespace fb

extern "C" {

// Every target is the number of a column or `ignored`. A row whose target is `ignored` has the loss 0.
void fb_entropy(int is_float, const void *x, int64_t rows, int64_t cols, const int64_t *targets, int64_t ignored,
                float *losses, float *log_sums, int threads) {
  if (is_float)
    fb::entropy((const float *)x, rows, cols, targets, ignored, losses, log_sums, threads);
  else
    fb::entropy((const fb::bf16 *)x, rows, cols, targets, ignored, losses, log_sums, threads);
}
// scales: the gradients of the losses. dx may be x.
void fb_entropy_backward(int is_float, const void *x, int64_t rows, int64_t cols, const int64_t *targets,
                         int64_t ignored, const float *log_sums, const float *scales, void *dx, int threads) {
  if (is_float)
    fb::entropy_backward((const float *)x, rows, cols, targets, ignored, log_sums, scales, (float *)dx, threads);
  else
    fb::entropy_backward((const fb::bf16 *)x, rows, cols, targets, ignored, log_sums, scales, (fb::bf16 *)dx, threads);
}
}
