// Activations of feed-forward layers, forward and backward: squared ReLU, GELU and SwiGLU. Each function reads every
// operand once and rounds a result once; all arithmetic is float32, element by element.
#include <algorithm>
#include "parallel.h"
#include "vector.h"

namespace fb {
namespace {

constexpr int64_t ELEMENTS = 4096;  // the number of elements that a thread processes at a time

// Call f(i, lanes, N) for groups of N vectors, as `each_group` does.
template <class F> void each_element(int64_t n, int threads, F f) {
  in_parallel((n + ELEMENTS - 1) / ELEMENTS, threads, [&](int64_t chunks) {
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      int64_t start = chunk * ELEMENTS;
      each_group(std::min(ELEMENTS, n - start),
                 [&](int64_t i, auto lanes, auto count) FB_INLINED { f(start + i, lanes, count); });
    }
  });
}
template <int N, class T, class Lanes> FB_INLINE void load_group(F32x16 (&v)[N], const T *from, Lanes lanes) {
  each<N>([&](int k) FB_INLINED { v[k] = load(from + k * LANES, lanes); });
}

FB_INLINE F32x16 relu(F32x16 x) { return select(x < 0.0f, F32x16{}, x); }  // NaN stays NaN

template <class T> void squared_relu(int64_t n, const T *x, T *y, int threads) {
  each_element(n, threads, [&](int64_t i, auto lanes, auto count) FB_INLINED {
    each<count>([&](int k) FB_INLINED {
      F32x16 r = relu(load(x + i + k * LANES, lanes));
      store(y + i + k * LANES, r * r, lanes);
    });
  });
}
template <class T> void squared_relu_backward(int64_t n, const T *x, const T *dy, T *dx, int threads) {
  each_element(n, threads, [&](int64_t i, auto lanes, auto count) FB_INLINED {
    each<count>([&](int k) FB_INLINED {
      F32x16 r = relu(load(x + i + k * LANES, lanes));
      store(dx + i + k * LANES, load(dy + i + k * LANES, lanes) * (r + r), lanes);
    });
  });
}

// For N vectors x of normally distributed values. density: e^(-x²/2), the density times √(2π). below: the probability
// of a value below x.
template <int N> struct Normal {
  F32x16 density[N], below[N];
};
// The probability of a value above |x| is e^(-x²/2) · t·q(t) with t = 1/(1 + 0.35·|x|). The polynomial q was fitted to
// erfcx(|x|/√2)/(2t) for |x| <= 14 with relative errors up to 3.2e-8, so small probabilities are accurate too.
template <int N> FB_INLINE Normal<N> normal(const F32x16 (&x)[N]) {
  constexpr float q[] = {1.439727070e-01f, -2.557163190e-01f, 1.591764911e-01f, -2.311141730e-02f,
                         1.055086629e-01f, 1.198327039e-01f,  1.398618918e-01f, 1.396214031e-01f};
  Normal<N> result;
  F32x16 t[N], sum[N];
  each<N>([&](int k) FB_INLINED {
    const F32x16 size = select(x[k] < 0.0f, -x[k], x[k]);
    result.density[k] = (size * size) * -0.5f;
    t[k] = 1.0f / (size * 0.35f + 1.0f);
  });
  exponentials(result.density);
  each<N>([&](int k) FB_INLINED { sum[k] = t[k] * -2.914613938e-02f + q[0]; });
  each<7>([&](int i) FB_INLINED {
    together(sum);
    each<N>([&](int k) FB_INLINED { sum[k] = sum[k] * t[k] + q[i + 1]; });
  });
  each<N>([&](int k) FB_INLINED {
    const F32x16 beyond = result.density[k] * (t[k] * sum[k]);
    result.below[k] = select(x[k] < 0.0f, beyond, 1.0f - beyond);
  });
  return result;
}
template <class T> void gelu(int64_t n, const T *x, T *y, int threads) {
  each_element(n, threads, [&](int64_t i, auto lanes, auto count) FB_INLINED {
    F32x16 v[count];
    load_group(v, x + i, lanes);
    const auto at = normal(v);
    each<count>([&](int k) FB_INLINED { store(y + i + k * LANES, v[k] * at.below[k], lanes); });
  });
}
template <class T> void gelu_backward(int64_t n, const T *x, const T *dy, T *dx, int threads) {
  each_element(n, threads, [&](int64_t i, auto lanes, auto count) FB_INLINED {
    F32x16 v[count];
    load_group(v, x + i, lanes);
    const auto at = normal(v);
    each<count>([&](int k) FB_INLINED {
      const F32x16 slope = (v[k] * at.density[k]) * 0.3989422804f + at.below[k];
      store(dx + i + k * LANES, load(dy + i + k * LANES, lanes) * slope, lanes);
    });
  });
}

template <int N> FB_INLINE void sigmoids(const F32x16 (&x)[N], F32x16 (&y)[N]) {
  each<N>([&](int k) FB_INLINED { y[k] = -x[k]; });
  exponentials(y);
  each<N>([&](int k) FB_INLINED { y[k] = 1.0f / (y[k] + 1.0f); });
}
template <class T> void swiglu(int64_t n, const T *gate, const T *up, T *y, int threads) {
  each_element(n, threads, [&](int64_t i, auto lanes, auto count) FB_INLINED {
    F32x16 g[count], s[count];
    load_group(g, gate + i, lanes);
    sigmoids(g, s);
    each<count>([&](int k)
                    FB_INLINED { store(y + i + k * LANES, (g[k] * s[k]) * load(up + i + k * LANES, lanes), lanes); });
  });
}
template <class T>
void swiglu_backward(int64_t n, const T *gate, const T *up, const T *dy, T *dgate, T *dup, int threads) {
  each_element(n, threads, [&](int64_t i, auto lanes, auto count) FB_INLINED {
    F32x16 g[count], s[count];
    load_group(g, gate + i, lanes);
    sigmoids(g, s);
    each<count>([&](int k) FB_INLINED {
      const int64_t at = i + k * LANES;
      const F32x16 d = load(dy + at, lanes), silu = g[k] * s[k];
      store(dup + at, d * silu, lanes);
      store(dgate + at, (d * load(up + at, lanes)) * (silu * (1.0f - s[k]) + s[k]), lanes);
    });
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
