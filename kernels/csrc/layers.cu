// Layers on a GPU: norms with the addition of a residual branch, cross entropy, activations and rotary positions,
// forward and backward. The results have the bits of the CPU's operators (reference/layers.py), because sums have the
// same order: 16 lanes along a row, of which a half warp has one each; blocks of rows, and then the sums of the blocks.
// The only exceptions are logarithms of double precision, which are rounded to float32.
#include "functions.h"
#include "tile.cuh"

namespace fb {

struct HeadsView {  // heads of a tensor [batch, token, head, dimension]; strides in elements
  void *data;
  int64_t batch, token, head;
};
struct LayerCall {  // backends/gpu/layers.py
  const void *in[4];
  void *out[3];
  const float *weight, *bias;  // norms: groups x cols; bias may be null
  float *means, *inverses;     // norms: by row; means: null for an RMS norm
  const float *scales;         // cross entropy: the gradients of the losses; rotation: cosines and sines by token
  const int64_t *targets;      // cross entropy
  int64_t rows, ignored;       // activations: rows is the number of elements; ignored: the target of rows without loss
  HeadsView from[3], to[3];    // rotation: of q, k and v
  int32_t cols, groups;        // groups: the rows that follow each other and have weights of their own
  int32_t heads[3], tokens, size, rotated;  // rotation; size: dimensions of a head, of which the first are rotated
  int32_t aligned;                          // vectors of eight elements start at multiples of 16 bytes
  float offset, eps, sign;                  // sign: -1 for the inverse rotation
};

constexpr int LANES = 16, AT_ONCE = 8, MOST_BLOCKS = 64;

template <class D> FB_D float get(const void *from, int64_t i) {
  return D::widen(((const typename D::Storage *)from)[i]);
}
template <class D> FB_D float put(void *to, int64_t i, float v) {  // returns what a load would return
  const typename D::Storage s = D::narrow(v);
  ((typename D::Storage *)to)[i] = s;
  return D::widen(s);
}
template <class D> FB_D void get_eight(const void *from, int64_t first, int valid, bool whole, float (&v)[WIDTH]) {
  if (whole && valid == WIDTH) {
    Vector<D> x;
    const uint4 *at = (const uint4 *)((const typename D::Storage *)from + first);
#pragma unroll
    for (int i = 0; i < Vector<D>::WORDS; i += 4) {
      const uint4 q = __ldcs(at + i / 4);
      x.w[i] = q.x, x.w[i + 1] = q.y, x.w[i + 2] = q.z, x.w[i + 3] = q.w;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) v[i] = D::widen(x.get(i));
  } else {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) v[i] = i < valid ? get<D>(from, first + i) : 0.0f;
  }
}
template <class D> FB_D void put_eight(void *to, int64_t first, int valid, bool whole, const float (&v)[WIDTH]) {
  if (whole && valid == WIDTH) {
    Vector<D> y;
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) y.set_two(i, v[i], v[i + 1]);
    uint4 *at = (uint4 *)((typename D::Storage *)to + first);
#pragma unroll
    for (int i = 0; i < Vector<D>::WORDS; i += 4) at[i / 4] = uint4{y.w[i], y.w[i + 1], y.w[i + 2], y.w[i + 3]};
  } else {
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (i < valid) put<D>(to, first + i, v[i]);
  }
}

// ---------------------------------------------------------------------------------------------- rows of 16 lanes

struct Row {
  int64_t number, start;
  int lane, cols;
  FB_D explicit Row(const LayerCall &c) : lane(int(threadIdx.x) % LANES) {
    number = int64_t(blockIdx.x) * (shape().threads / LANES) + threadIdx.x / LANES;
    cols = number < c.rows ? c.cols : 0;  // threads without a row only take part in the sums
    start = number * c.cols;
  }
  // Call f(i, k) for the elements i of this lane in ascending order; k < AT_ONCE is their position in a group. `first`
  // is called in the same way for the whole group before, to load operands.
  template <class First, class F> FB_D void each(First first, F f) const {
    for (int at = lane; at < cols; at += LANES * AT_ONCE) {
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++)
        if (at + k * LANES < cols) first(at + k * LANES, k);
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++)
        if (at + k * LANES < cols) f(at + k * LANES, k);
    }
  }
};

FB_D float total(float lane_sum) {
#pragma unroll
  for (int d = LANES / 2; d > 0; d /= 2) lane_sum = lane_sum + __shfl_xor_sync(ALL, lane_sum, d);
  return lane_sum;
}

template <class D> FB_D const void *at_row(const void *x, const Row &row) {
  return x ? (const typename D::Storage *)x + row.start : nullptr;
}
template <class D> FB_D void *at_row(void *x, const Row &row) {
  return x ? (typename D::Storage *)x + row.start : nullptr;
}

// n = norm(s) with s = x + y; without y, s is x. in: x, y. out: n, s.
template <class D, class O> FB_D void norm(const LayerCall &c) {
  const Row row(c);
  const bool centered = c.means, added = c.in[1];
  const void *x = at_row<D>(c.in[0], row), *y = at_row<D>(c.in[1], row);
  void *s = at_row<D>(c.out[1], row), *n = at_row<O>(c.out[0], row);
  float a[AT_ONCE], b[AT_ONCE], sum = 0.0f, squares = 0.0f, mean = 0.0f;
  row.each(
      [&](int i, int k) {
        a[k] = get<D>(x, i);
        if (added) b[k] = get<D>(y, i);
      },
      [&](int i, int k) {
        if (added) a[k] = put<D>(s, i, a[k] + b[k]);
        if (centered)
          sum = sum + a[k];
        else
          squares = squares + a[k] * a[k];
      });
  if (added) x = s;
  auto read = [&](int i, int k) { a[k] = get<D>(x, i); };
  if (centered) {
    mean = total(sum) / float(c.cols);
    row.each(read, [&](int, int k) { squares = squares + (a[k] - mean) * (a[k] - mean); });
  }
  const float inverse = 1.0f / sqrtf(total(squares) / float(c.cols) + c.eps);
  const float *weight = c.weight + row.number % c.groups * c.cols;
  const float *bias = c.bias ? c.bias + row.number % c.groups * c.cols : nullptr;
  row.each(read, [&](int i, int k) {
    const float scaled = ((centered ? a[k] - mean : a[k]) * inverse) * (weight[i] + c.offset);
    put<O>(n, i, bias ? scaled + bias[i] : scaled);
  });
  if (row.lane || !row.cols) return;
  if (centered) c.means[row.number] = mean;
  c.inverses[row.number] = inverse;
}

// dx, the gradient through the norm, plus ds. in: s, ds (may be null), dn. out: dx.
template <class D, class O> FB_D void norm_backward(const LayerCall &c) {
  const Row row(c);
  const bool centered = c.means, added = c.in[1];
  const void *s = at_row<D>(c.in[0], row), *ds = at_row<D>(c.in[1], row), *dn = at_row<O>(c.in[2], row);
  void *dx = at_row<D>(c.out[0], row);
  const float *weight = c.weight + row.number % c.groups * c.cols;
  const float mean = centered && row.cols ? c.means[row.number] : 0.0f;
  const float inverse = row.cols ? c.inverses[row.number] : 0.0f;
  float hats[AT_ONCE], products[AT_ONCE], more[AT_ONCE], sum = 0.0f, moment = 0.0f;
  auto read = [&](int i, int k) { hats[k] = get<D>(s, i), products[k] = get<O>(dn, i); };
  auto compute = [&](int i, int k) {
    hats[k] = (centered ? hats[k] - mean : hats[k]) * inverse;
    products[k] = products[k] * (weight[i] + c.offset);
  };
  row.each(read, [&](int i, int k) {
    compute(i, k);
    sum = sum + products[k];
    moment = moment + products[k] * hats[k];
  });
  const float a = total(sum) / float(c.cols), b = total(moment) / float(c.cols);
  row.each(
      [&](int i, int k) {
        read(i, k);
        if (added) more[k] = get<D>(ds, i);
      },
      [&](int i, int k) {
        compute(i, k);
        const float through = ((centered ? products[k] - a : products[k]) - hats[k] * b) * inverse;
        put<D>(dx, i, added ? through + more[k] : through);
      });
}

// The gradients of weight and bias. A CTA has 16 columns; a thread adds the rows of one block in one column. in: s, -,
// dn. out: dweight, dbias (may be null).
template <class D, class O> FB_D void norm_weights(const LayerCall &c) {
  __shared__ float sums[2][MOST_BLOCKS][LANES];
  const int block = int(threadIdx.x) / LANES, lane = int(threadIdx.x) % LANES, across = c.groups * c.cols;
  const int col = int(blockIdx.x) * LANES + lane, group = col / c.cols;
  const int64_t rows = c.rows / c.groups, least = (rows + MOST_BLOCKS - 1) / MOST_BLOCKS;
  const int64_t each = least > MOST_BLOCKS ? least : MOST_BLOCKS;
  const int64_t end = (block + 1) * each < rows ? (block + 1) * each : rows;
  float weight = 0.0f, bias = 0.0f;
  if (col < across) {
#pragma unroll 4
    for (int64_t r = block * each; r < end; r++) {
      const float s = get<D>(c.in[0], r * across + col), d = get<O>(c.in[2], r * across + col);
      const float hat = (c.means ? s - c.means[r * c.groups + group] : s) * c.inverses[r * c.groups + group];
      weight = weight + hat * d;
      bias = bias + d;
    }
  }
  sums[0][block][lane] = weight, sums[1][block][lane] = bias;
  __syncthreads();
  if (block > 1 || col >= across || !c.out[block]) return;
  float all = 0.0f;
  for (int i = 0; i < MOST_BLOCKS; i++) all = all + sums[block][i][lane];
  ((float *)c.out[block])[col] = all;
}

// −log softmax(x)[target] and log Σ e^x of each row. A target that is no column makes both NaN. in: x. out: losses, log
// sums.
template <class D, class O> FB_D void entropy(const LayerCall &c) {
  const Row row(c);
  const void *from = at_row<D>(c.in[0], row);
  float x[AT_ONCE], most = value(INF | SIGN), sum = 0.0f;
  auto read = [&](int i, int k) { x[k] = get<D>(from, i); };
  row.each(read, [&](int, int k) { most = most > x[k] ? most : x[k]; });
#pragma unroll
  for (int d = LANES / 2; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(ALL, most, d);
    most = most > other ? most : other;
  }
  row.each(read, [&](int, int k) { sum = sum + exponential(x[k] - most); });
  sum = total(sum);
  if (row.lane || !row.cols) return;
  const int64_t target = c.targets[row.number];
  float loss = 0.0f, log_sum = 0.0f;
  if (target != c.ignored && (target < 0 || target >= c.cols)) {
    loss = log_sum = value(NAN_BITS);
  } else if (target != c.ignored) {
    const double logarithm = log(double(sum));
    log_sum = float(double(most) + logarithm);
    loss = float((double(most) - double(get<D>(from, target))) + logarithm);
  }
  ((float *)c.out[0])[row.number] = loss;
  ((float *)c.out[1])[row.number] = log_sum;
}

// (softmax(x) − one hot) · scale; a CTA has one row. in: x, log sums. out: dx, which may be x.
template <class D, class O> FB_D void entropy_backward(const LayerCall &c) {
  const int64_t row = blockIdx.x, target = c.targets[row];
  const float log_sum = ((const float *)c.in[1])[row], scale = c.scales[row];
  for (int first = int(threadIdx.x) * WIDTH; first < c.cols; first += shape().threads * WIDTH) {
    const int valid = c.cols - first < WIDTH ? c.cols - first : WIDTH;
    float v[WIDTH];
    get_eight<D>(c.in[0], row * c.cols + first, valid, c.aligned, v);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      const float e = exponential(v[i] - log_sum);
      v[i] = target == c.ignored ? 0.0f : (first + i == target ? e - 1.0f : e) * scale;
    }
    put_eight<D>(c.out[0], row * c.cols + first, valid, c.aligned, v);
  }
}

// ---------------------------------------------------------------------------------------------- elements

// Apply f(operands, results) to each element of IN tensors.
template <class D, int IN, int OUT, class F> FB_D void each_element(const LayerCall &c, F f) {
  const int64_t first = (int64_t(blockIdx.x) * shape().threads + threadIdx.x) * WIDTH, left = c.rows - first;
  if (left <= 0) return;
  const int valid = left < WIDTH ? int(left) : WIDTH;
  float x[IN][WIDTH], y[OUT][WIDTH];
#pragma unroll
  for (int n = 0; n < IN; n++) get_eight<D>(c.in[n], first, valid, c.aligned, x[n]);
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    float operands[IN], results[OUT];
#pragma unroll
    for (int n = 0; n < IN; n++) operands[n] = x[n][i];
    f(operands, results);
#pragma unroll
    for (int n = 0; n < OUT; n++) y[n][i] = results[n];
  }
#pragma unroll
  for (int n = 0; n < OUT; n++) put_eight<D>(c.out[n], first, valid, c.aligned, y[n]);
}

template <class D, class O> FB_D void squared_relu(const LayerCall &c) {
  each_element<D, 1, 1>(c, [](const float *x, float *y) { y[0] = relu(x[0]) * relu(x[0]); });
}
template <class D, class O> FB_D void squared_relu_backward(const LayerCall &c) {
  each_element<D, 2, 1>(c, [](const float *x, float *dx) { dx[0] = x[1] * (relu(x[0]) + relu(x[0])); });
}
template <class D, class O> FB_D void gelu(const LayerCall &c) {
  each_element<D, 1, 1>(c, [](const float *x, float *y) { y[0] = x[0] * normal(x[0]).below; });
}
template <class D, class O> FB_D void gelu_backward(const LayerCall &c) {
  each_element<D, 2, 1>(c, [](const float *x, float *dx) {
    const Normal at = normal(x[0]);
    dx[0] = x[1] * ((x[0] * at.density) * 0.3989422804f + at.below);
  });
}
template <class D, class O> FB_D void swiglu(const LayerCall &c) {  // in: gate, up
  each_element<D, 2, 1>(c, [](const float *x, float *y) { y[0] = (x[0] * sigmoid(x[0])) * x[1]; });
}
template <class D, class O> FB_D void swiglu_backward(const LayerCall &c) {  // in: gate, up, dy; out: dgate, dup
  each_element<D, 3, 2>(c, [](const float *x, float *y) {
    const float s = sigmoid(x[0]), silu = x[0] * s;
    y[0] = (x[2] * x[1]) * (silu * (1.0f - s) + s);
    y[1] = x[2] * silu;
  });
}

// Rotate the heads of q and k, and copy those of v. A thread has eight dimensions of one head.
template <class D, class O> FB_D void rotate(const LayerCall &c) {
  const int pieces = (c.size + WIDTH - 1) / WIDTH, heads = c.heads[0] + c.heads[1] + c.heads[2];
  const int64_t thread = int64_t(blockIdx.x) * shape().threads + threadIdx.x, at = thread / pieces, row = at / heads;
  if (row >= c.rows) return;
  const int first = int(thread - at * pieces) * WIDTH, valid = c.size - first < WIDTH ? c.size - first : WIDTH;
  const int64_t batch = row / c.tokens, token = row - batch * c.tokens;
  int head = int(at - row * heads), part = 0;
#pragma unroll
  for (int p = 0; p < 2; p++)
    if (part == p && head >= c.heads[p]) head -= c.heads[p], part++;
  const HeadsView from = part == 0 ? c.from[0] : part == 1 ? c.from[1] : c.from[2];
  const HeadsView to = part == 0 ? c.to[0] : part == 1 ? c.to[1] : c.to[2];
  float v[WIDTH];
  get_eight<D>(from.data, batch * from.batch + token * from.token + head * from.head + first, valid, c.aligned, v);
  const float *turns = c.scales + token * c.rotated + first;
#pragma unroll
  for (int i = 0; i < WIDTH; i += 2)
    if (part < 2 && first + i < c.rotated) {
      const float cosine = turns[i], sine = turns[i + 1] * c.sign, even = v[i], odd = v[i + 1];
      v[i] = even * cosine - odd * sine, v[i + 1] = odd * cosine + even * sine;
    }
  put_eight<D>(to.data, batch * to.batch + token * to.token + head * to.head + first, valid, c.aligned, v);
}

}  // namespace fb

#ifndef FB_SIMT
extern "C" __global__ void __launch_bounds__(fb::shape().threads, fb::least_ctas())
    run(const __grid_constant__ fb::LayerCall call) {
  fb::FB_KERNEL<fb::FB_DTYPE, fb::FB_OTHER>(call);
}
#endif
