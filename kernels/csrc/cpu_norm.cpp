// Layer norms and RMS norms, with the addition of a residual branch before them, forward and backward.
//
// A tensor has rows x groups x width elements; each vector of `width` elements is normalised, with the weights of its
// group (Mamba-2 has several groups). Sums along a vector: element i is added to lane i mod 16, in ascending order of
// i; then `total` adds the lanes. Sums over rows (the gradients of weight and bias): rows are divided into blocks whose
// size depends only on the number of rows; the rows of a block are added in order, then the sums of the blocks. So no
// result depends on the number of threads.
#include <math.h>
#include <algorithm>
#include <vector>
#include "parallel.h"
#include "vector.h"

namespace fb {
namespace {

struct NormCall {  // mirrors _Call of layers/norms.py
  int64_t rows, groups, width;
  const float *weight, *bias;  // groups x width; bias may be null
  float offset, eps;           // offset: added to the weight
  int32_t centered, threads;   // centered: a layer norm, else an RMS norm
};

// Return the number of rows in a block: at least 64, and large enough that there are at most 64 blocks.
inline int64_t block_rows(int64_t rows) { return std::max<int64_t>(64, (rows + 63) / 64); }

// Compute n, the norm of s = x + y, where s is rounded to the storage type and stored; without ADD, n is the norm of x.
// v: memory for one padded row.
template <class In, class Out, bool ADD, bool CENTERED>
void forward_row(const NormCall &c, int64_t group, const In *x, const In *y, In *s, Out *n, float *v, float *mean,
                 float *inverse) {
  const float *weight = c.weight + group * c.width, *bias = c.bias ? c.bias + group * c.width : nullptr;
  const float count = float(c.width), offset = c.offset;
  F32x16 sum = {}, squares = {};
  each_vector(c.width, [&](int64_t i, auto lanes) FB_INLINED {
    F32x16 a = load(x + i, lanes);
    if (ADD) a = stored(s + i, a + load(y + i, lanes), lanes);
    store(v + i, a);
    if (CENTERED)
      sum += a;
    else
      squares += a * a;
  });
  if (CENTERED) {
    const float middle = total(sum) / count;
    *mean = middle;
    each_vector(c.width, [&](int64_t i, auto lanes) FB_INLINED {
      F32x16 a = keep(load(v + i) - middle, lanes);
      store(v + i, a);
      squares += a * a;
    });
  }
  const float factor = 1.0f / sqrtf(total(squares) / count + c.eps);
  *inverse = factor;
  auto scaled = [=](int64_t i, auto lanes)
                    FB_INLINED { return (load(v + i) * factor) * (load(weight + i, lanes) + offset); };
  if (bias)
    each_vector(c.width, [=](int64_t i, auto lanes)
                             FB_INLINED { store(n + i, scaled(i, lanes) + load(bias + i, lanes), lanes); });
  else
    each_vector(c.width, [=](int64_t i, auto lanes) FB_INLINED { store(n + i, scaled(i, lanes), lanes); });
}

template <class In, class Out, bool ADD, bool CENTERED>
void forward(const NormCall &c, const In *x, const In *y, In *s, Out *n, float *mean, float *inverse) {
  in_parallel(c.rows, c.threads, [&](int64_t count) {
    std::vector<float> v(size_t(padded(c.width)));
#pragma omp for schedule(static)
    for (int64_t r = 0; r < count; r++)
      for (int64_t g = 0; g < c.groups; g++) {
        int64_t row = r * c.groups + g, at = row * c.width;
        forward_row<In, Out, ADD, CENTERED>(c, g, x + at, ADD ? y + at : nullptr, ADD ? s + at : nullptr, n + at,
                                            v.data(), CENTERED ? mean + row : nullptr, inverse + row);
      }
  });
}

// Compute dx, the gradient through the norm (with ADD: plus ds), and add the row's contributions to dweight and dbias.
// hats, products: memory for one padded row each.
template <class In, class Out, bool ADD, bool CENTERED>
void backward_row(const NormCall &c, const float *weight, const In *s, const In *ds, const Out *dn, float mean,
                  float inverse, In *dx, float *dweight, float *dbias, float *hats, float *products) {
  const float offset = c.offset;
  F32x16 sum = {}, moment = {};
  each_vector(c.width, [&](int64_t i, auto lanes) FB_INLINED {
    F32x16 hat = load(s + i, lanes), d = load(dn + i, lanes);
    if (CENTERED) hat = keep(hat - mean, lanes);
    hat = hat * inverse;
    store(dweight + i, load(dweight + i) + hat * d);
    if (dbias) store(dbias + i, load(dbias + i) + d);
    F32x16 product = d * (load(weight + i, lanes) + offset);
    if (CENTERED) sum += product;
    moment += product * hat;
    store(hats + i, hat);
    store(products + i, product);
  });
  const float count = float(c.width), a = total(sum) / count, b = total(moment) / count;
  each_vector(c.width, [&](int64_t i, auto lanes) FB_INLINED {
    F32x16 d = load(products + i);
    if (CENTERED) d = d - a;
    d = (d - load(hats + i) * b) * inverse;
    if (ADD) d += load(ds + i, lanes);
    store(dx + i, d, lanes);
  });
}

template <class In, class Out, bool ADD, bool CENTERED>
void backward(const NormCall &c, const In *s, const In *ds, const Out *dn, const float *mean, const float *inverse,
              In *dx, float *dweight, float *dbias) {
  const int64_t width = padded(c.width), size = c.groups * width, per = block_rows(c.rows);
  const int64_t blocks = (c.rows + per - 1) / per;
  std::vector<float> partial(size_t(blocks * size * (dbias ? 2 : 1)));
  in_parallel(blocks, c.threads, [&](int64_t count) {
    std::vector<float> hats(size_t(width), 0.0f), products(size_t(width), 0.0f);
#pragma omp for schedule(static)
    for (int64_t block = 0; block < count; block++) {
      float *weights = partial.data() + block * size, *biases = dbias ? weights + blocks * size : nullptr;
      for (int64_t r = block * per; r < std::min(c.rows, (block + 1) * per); r++)
        for (int64_t g = 0; g < c.groups; g++) {
          int64_t row = r * c.groups + g, at = row * c.width;
          backward_row<In, Out, ADD, CENTERED>(c, c.weight + g * c.width, s + at, ADD ? ds + at : nullptr, dn + at,
                                               CENTERED ? mean[row] : 0.0f, inverse[row], dx + at, weights + g * width,
                                               biases ? biases + g * width : nullptr, hats.data(), products.data());
        }
    }
  });
  auto add_blocks = [&](const float *from, float *to) {
    for (int64_t g = 0; g < c.groups; g++)
      each_vector(c.width, [&](int64_t i, auto lanes) FB_INLINED {
        F32x16 sum = {};
        for (int64_t block = 0; block < blocks; block++) sum += load(from + block * size + g * width + i);
        store(to + g * c.width + i, sum, lanes);
      });
  };
  add_blocks(partial.data(), dweight);
  if (dbias) add_blocks(partial.data() + blocks * size, dbias);
}

// Call f with a value of the input type and a value of the output type: float if the flag is 1, BF16 if it is 0.
template <class F> void with_types(int in_is_float, int out_is_float, F f) {
  if (in_is_float)
    out_is_float ? f(float(), float()) : f(float(), bf16());
  else
    out_is_float ? f(bf16(), float()) : f(bf16(), bf16());
}

}  // namespace
}  // namespace fb

extern "C" {

// y, s: null for a norm of x alone. mean: null for an RMS norm. mean, inverse: the mean and 1 / deviation of each row.
void fb_norm(const fb::NormCall *c, int in_is_float, int out_is_float, const void *x, const void *y, void *s, void *n,
             float *mean, float *inverse) {
  fb::with_types(in_is_float, out_is_float, [&](auto in, auto out) {
    typedef decltype(in) In;
    typedef decltype(out) Out;
    auto run = y ? (c->centered ? fb::forward<In, Out, true, true> : fb::forward<In, Out, true, false>)
                 : (c->centered ? fb::forward<In, Out, false, true> : fb::forward<In, Out, false, false>);
    run(*c, (const In *)x, (const In *)y, (In *)s, (Out *)n, mean, inverse);
  });
}

// ds: the gradient of s from uses of s other than the norm, or null. dbias may be null.
void fb_norm_backward(const fb::NormCall *c, int in_is_float, int out_is_float, const void *s, const void *ds,
                      const void *dn, const float *mean, const float *inverse, void *dx, float *dweight, float *dbias) {
  fb::with_types(in_is_float, out_is_float, [&](auto in, auto out) {
    typedef decltype(in) In;
    typedef decltype(out) Out;
    auto run = ds ? (c->centered ? fb::backward<In, Out, true, true> : fb::backward<In, Out, true, false>)
                  : (c->centered ? fb::backward<In, Out, false, true> : fb::backward<In, Out, false, false>);
    run(*c, (const In *)s, (const In *)ds, (const Out *)dn, mean, inverse, (In *)dx, dweight, dbias);
  });
}
}
