// Activations of feed-forward layers, forward and backward: squared ReLU, GELU and SwiGLU. Each function reads every
// operand once and rounds a result once; all arithmetic is float32, element by element.
#include <algorithm>
#include "parallel.h"
#include "vector.h"

namespace fb {
namespace {

constexpr int64_t ELEMENTS = 4096;  // the number of elements that a thread processes at a time

template <class F> void each_element(int64_t n, int threads, F f) {
  in_parallel((n + ELEMENTS - 1) / ELEMENTS, threads, [&](int64_t count) {
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < count; chunk++) {
      int64_t start = chunk * ELEMENTS;
      each_vector(std::min(ELEMENTS, n - start), [&](int64_t i, auto lanes) FB_INLINED { f(start + i, lanes); });
    }
  });
}

FB_INLINE F32x16 relu(F32x16 x) { return select(x < 0.0f, F32x16{}, x); }  // NaN stays NaN
FB_INLINE F32x16 sigmoid(F32x16 x) { return 1.0f / (exponential(-x) + 1.0f); }

template <class T> void squared_relu(int64_t n, const T *x, T *y, int threads) {
  each_element(n, threads, [&](int64_t i, auto lanes) FB_INLINED {
    F32x16 r = relu(load(x + i, lanes));
    store(y + i, r * r, lanes);
  });
}
template <class T> void squared_relu_backward(int64_t n, const T *x, const T *dy, T *dx, int threads) {
  each_element(n, threads, [&](int64_t i, auto lanes) FB_INLINED {
    F32x16 r = relu(load(x + i, lanes));
    store(dx + i, load(dy + i, lanes) * (r + r), lanes);
  });
}

// density: e^(-x²/2), the density of the normal distribution times √(2π). below: the probability of a value below x.
struct Normal {
  F32x16 density, below;
};
// The probability of a value above |x| is e^(-x²/2) · t·q(t) with t = 1/(1 + 0.35·|x|). The polynomial q was fitted to
// erfcx(|x|/√2)/(2t) for |x| <= 14 with relative errors up to 3.2e-8, so small probabilities are accurate too.
FB_INLINE Normal normal(const F32x16 &x) {
  constexpr float q[] = {1.439727070e-01f, -2.557163190e-01f, 1.591764911e-01f, -2.311141730e-02f,
                         1.055086629e-01f, 1.198327039e-01f,  1.398618918e-01f, 1.396214031e-01f};
  F32x16 size = select(x < 0.0f, -x, x), density = exponential((size * size) * -0.5f);
  F32x16 t = 1.0f / (size * 0.35f + 1.0f), sum = t * -2.914613938e-02f + q[0];
#pragma GCC unroll 8
  for (int i = 1; i < 8; i++) sum = sum * t + q[i];
  F32x16 beyond = density * (t * sum);
  return Normal{density, select(x < 0.0f, beyond, 1.0f - beyond)};
}
template <class T> void gelu(int64_t n, const T *x, T *y, int threads) {
  each_element(n, threads, [&](int64_t i, auto lanes) FB_INLINED {
    F32x16 v = load(x + i, lanes);
    store(y + i, v * normal(v).below, lanes);
  });
}
template <class T> void gelu_backward(int64_t n, const T *x, const T *dy, T *dx, int threads) {
  each_element(n, threads, [&](int64_t i, auto lanes) FB_INLINED {
    F32x16 v = load(x + i, lanes);
    Normal at = normal(v);
    store(dx + i, load(dy + i, lanes) * ((v * at.density) * 0.3989422804f + at.below), lanes);
  });
}

template <class T> void swiglu(int64_t n, const T *gate, const T *up, T *y, int threads) {
  each_element(n, threads, [&](int64_t i, auto lanes) FB_INLINED {
    F32x16 g = load(gate + i, lanes);
    store(y + i, (g * sigmoid(g)) * load(up + i, lanes), lanes);
  });
}
template <class T>
void swiglu_backward(int64_t n, const T *gate, const T *up, const T *dy, T *dgate, T *dup, int threads) {
  each_element(n, threads, [&](int64_t i, auto lanes) FB_INLINED {
    F32x16 g = load(gate + i, lanes), d = load(dy + i, lanes), s = sigmoid(g), silu = g * s;
    store(dup + i, d * silu, lanes);
    store(dgate + i, (d * load(up + i, lanes)) * (silu * (1.0f - s) + s), lanes);
  });
}

template <class F> void with_type(int is_float, F f) {
  if (is_float)
    f(float());
  else
    f(bf16());
}

}  // namespace
}  // namespace fb

extern "C" {

void fb_squared_relu(int is_float, int64_t n, const void *x, void *y, int threads) {
  fb::with_type(is_float, [&](auto t) {
    typedef decltype(t) T;
    fb::squared_relu(n, (const T *)x, (T *)y, threads);
  });
}
void fb_squared_relu_backward(int is_float, int64_t n, const void *x, const void *dy, void *dx, int threads) {
  fb::with_type(is_float, [&](auto t) {
    typedef decltype(t) T;
    fb::squared_relu_backward(n, (const T *)x, (const T *)dy, (T *)dx, threads);
  });
}
void fb_gelu(int is_float, int64_t n, const void *x, void *y, int threads) {
  fb::with_type(is_float, [&](auto t) {
    typedef decltype(t) T;
    fb::gelu(n, (const T *)x, (T *)y, threads);
  });
}
void fb_gelu_backward(int is_float, int64_t n, const void *x, const void *dy, void *dx, int threads) {
  fb::with_type(is_float, [&](auto t) {
    typedef decltype(t) T;
    fb::gelu_backward(n, (const T *)x, (const T *)dy, (T *)dx, threads);
  });
}
void fb_swiglu(int is_float, int64_t n, const void *gate, const void *up, void *y, int threads) {
  fb::with_type(is_float, [&](auto t) {
    typedef decltype(t) T;
    fb::swiglu(n, (const T *)gate, (const T *)up, (T *)y, threads);
  });
}
void fb_swiglu_backward(int is_float, int64_t n, const void *gate, const void *up, const void *dy, void *dgate,
                        void *dup, int threads) {
  fb::with_type(is_float, [&](auto t) {
    typedef decltype(t) T;
    fb::swiglu_backward(n, (const T *)gate, (const T *)up, (const T *)dy, (T *)dgate, (T *)dup, threads);
  });
}
}
