// Noise and sampled weights on a GPU, in separate kernels, as in GaussWS: one kernel draws packed noise, another kernel
// reads the noise and the weight. For the gradient of the bit widths, the noise is drawn again.
#include "noise.h"
#include "tile.cuh"

namespace fb {

struct WeightCall {
  const void *w, *grad;
  const float *bits;      // the bit width of each square
  const uint32_t *noise;  // packed nibbles, or bf16
  void *out;
  int64_t count;  // the amount of noise: words (gaussian) or elements (uniform)
  uint64_t seed;
  const uint64_t *seed_offset;                          // with replayed, as in Request
  int32_t rows, cols, block, uniform, aligned, unused;  // block: the side of a square; uniform: 1 for uniform noise

  FB_D uint64_t key() const { return spec<0>().replayed ? seed + *seed_offset : seed; }
};

constexpr int WORDS_EACH = 4;  // the number of words of noise, 16 bytes, that a thread draws

template <class D, class O> FB_D void gaussian_noise(const WeightCall &call) {
  int64_t first = (int64_t(blockIdx.x) * shape().threads + threadIdx.x) * WORDS_EACH;
  uint32_t *out = (uint32_t *)call.out;
  if (first + WORDS_EACH <= call.count) {
    uint32_t w[WORDS_EACH];
#pragma unroll
    for (int i = 0; i < WORDS_EACH; i++) w[i] = gaussian_word(uint64_t(first + i), call.key());
    *(uint4 *)(out + first) =
        uint4{w[0], w[1], w[2], w[3]};  // an ordinary store: the next kernel reads the noise, so caches should keep it
  } else {
    for (int64_t i = first; i < call.count; i++) out[i] = gaussian_word(uint64_t(i), call.key());
  }
}

template <class D, class O> FB_D void uniform_noise(const WeightCall &call) {
  int64_t first = (int64_t(blockIdx.x) * shape().threads + threadIdx.x) * WIDTH;
  if (first >= call.count) return;
  Words r = philox(uint64_t(first) >> 3, NOISE, call.key());
  Vector<Bf16> v{};
#pragma unroll
  for (int i = 0; i < WIDTH; i++) v.set(i, Bf16::narrow(uniform_value((r.w[i / 2] >> (16 * (i % 2))) & 0xffffu)));
  uint16_t *out = (uint16_t *)call.out + first;
  if (first + WIDTH <= call.count) {
    *(uint4 *)out = uint4{v.w[0], v.w[1], v.w[2], v.w[3]};
  } else {
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (first + i < call.count) out[i] = v.get(i);
  }
}

FB_D float noise_at(const WeightCall &call, uint64_t element) {
  if (call.uniform) return Bf16::widen(((const uint16_t *)call.noise)[element]);
  return gaussian_value(call.noise[element >> 3], uint32_t(element) & 7);
}
// Read the noise of eight consecutive elements, of which the first `valid` are in the matrix.
FB_D void eight_noises(const WeightCall &call, uint64_t first, int valid, bool aligned, float (&out)[WIDTH]) {
  if (!aligned || valid < WIDTH) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) out[i] = i < valid ? noise_at(call, first + uint64_t(i)) : 0.0f;
  } else if (call.uniform) {
    uint4 q = __ldcs((const uint4 *)((const uint16_t *)call.noise + first));
    Vector<Bf16> v{{q.x, q.y, q.z, q.w}};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) out[i] = Bf16::widen(v.get(i));
  } else {
    uint32_t word = call.noise[first >> 3];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) out[i] = gaussian_value(word, uint32_t(i));
  }
}

// Process the weight in tiles, as in quantization: the block of spec<0>() is the square of one bit width.
template <class D, class O> FB_D void sample_weight(const WeightCall &call) {
  const Spec s = spec<0>();
  Tile t(call.rows, call.cols, call.aligned, false);
  Vector<D> x[SLOTS];
  load<D>(call.w, t, false, x);
  uint32_t amax[SLOTS][WIDTH];
  block_amaxes<D>(s, t, x, amax);

  const Split split(s);
  int across = (call.cols + call.block - 1) / call.block;
  float scale[WIDTH];
  Vector<O> y[SLOTS];
#pragma unroll
  for (int k = 0; k < SLOTS; k++) {
    int valid = t.valid(k);
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (split.starts(k, i) && i < valid) {
        float width = call.bits[int64_t(t.row(k) / call.block) * across + (t.col(k) + i) / call.block];
        scale[i] = noise_scale(width, D::widen(typename D::Storage(amax[k][i])));
      }
    y[k] = Vector<O>{};
    if (valid == 0) continue;
    float noise[WIDTH];
    eight_noises(call, t.index(k), valid, call.cols % WIDTH == 0, noise);
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (i < valid) y[k].set(i, O::narrow(D::widen(x[k].get(i)) + noise[i] * scale[split.col(i)]));
  }
  store<O>(call.out, t, y, 0xffu);
}

// Each thread processes one column of a square; a CTA processes squares that lie side by side. The thread sums its
// column from the top; the sums of a square's columns are added by halving, in the order that arithmetic.md defines.
template <class D, class O> FB_D void sample_weight_backward(const WeightCall &call) {
  typedef typename D::Storage S;
  typedef typename O::Storage G;
  const int block = call.block, thread = int(threadIdx.x), threads = shape().threads;
  int across = (call.cols + threads - 1) / threads, band = int(blockIdx.x) / across;
  int col = (int(blockIdx.x) - band * across) * threads + thread, row0 = band * block;
  int row1 = row0 + block < call.rows ? row0 + block : call.rows;
  float sum = 0.0f;
  uint32_t top = 0;
  if (col < call.cols) {
#pragma unroll 4
    for (int row = row0; row < row1; row++) {
      int64_t index = int64_t(row) * call.cols + col;
      sum = sum + O::widen(((const G *)call.grad)[index]) * noise_at(call, uint64_t(index));
      top = larger(top, uint32_t(((const S *)call.w)[index] & D::magnitude_mask));
    }
  }
  __shared__ float sums[256];
  __shared__ uint32_t tops[256];
  int in_square = thread & (block - 1);
  for (int half = block / 2; half >= WARP; half /= 2) {
    sums[thread] = sum, tops[thread] = top;
    __syncthreads();
    if (in_square < half) sum = sum + sums[thread + half], top = larger(top, tops[thread + half]);
    __syncthreads();
  }
#pragma unroll
  for (int half = WARP / 2; half > 0; half /= 2)
    if (half < block) {
      sum = sum + __shfl_down_sync(ALL, sum, half);
      top = larger(top, __shfl_xor_sync(ALL, top, half));
    }
  if (in_square || col >= call.cols) return;
  int64_t square = int64_t(band) * ((call.cols + block - 1) / block) + col / block;
  float scale = noise_scale(call.bits[square], D::widen(S(top)));
  ((float *)call.out)[square] = bits_gradient(scale, sum);
}

}  // namespace fb

#ifndef FB_SIMT
extern "C" __global__ void __launch_bounds__(fb::shape().threads, fb::least_ctas())
    run(const __grid_constant__ fb::WeightCall call) {
  fb::FB_KERNEL<fb::FB_DTYPE, fb::FB_OTHER>(call);
}
#endif
