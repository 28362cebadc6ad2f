// Noise on the CPU: GaussWS's packed noise, DiffQ's uniform noise, Box-Muller for comparison, and sampled weights.
#include <math.h>
#include <algorithm>
#include <vector>
#include "memory.h"
#include "noise.h"
#include "parallel.h"
#include "request.h"

namespace fb {
namespace {

constexpr int64_t BATCH = 2048;  // the number of words (or uniform values) that a thread computes at a time

void gaussian(uint64_t first, int64_t words, uint64_t seed, uint32_t *out) {
  constexpr int GROUPS = SETS / 2;
  for (int64_t i = 0; i < words; i += GROUPS * REGISTER) {
    U32Part w[GROUPS][4], packed[GROUPS];
    draw_words(first + uint64_t(i), NOISE, seed, w);
    for (int g = 0; g < GROUPS; g++) packed[g] = gaussian_word(w[g][0], w[g][1], w[g][2], w[g][3]);
    if (words - i >= GROUPS * REGISTER) {
      memcpy(out + i, &packed, sizeof packed);
    } else {
      memcpy(out + i, &packed, size_t(words - i) * 4);
    }
  }
}

// Unpack the eight values of each of n words, with the same results as `gaussian_value`. (The sign bit of a nibble is 0
// if its magnitude is 0.)
void unpack_words(const uint32_t *words, int64_t n, float *out) {
  int64_t i = 0;
#ifdef __AVX512BW__  // each nibble is the index of its value in a table
  const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 0, -1, -2, -3, -4, -5, -6, -7);
  for (; i + 2 <= n; i += 2) {
    const __m512i both = _mm512_mask_set1_epi32(_mm512_set1_epi32(int(words[i])), 0xff00, int(words[i + 1]));
    _mm512_storeu_ps(out + 8 * i, _mm512_permutexvar_ps(_mm512_srlv_epi32(both, shifts), values));
  }
#endif
  typedef uint32_t U32x8 __attribute__((vector_size(32)));
  typedef int32_t I32x8 __attribute__((vector_size(32)));
  typedef float F32x8 __attribute__((vector_size(32)));
  for (; i < n; i++) {
    const U32x8 nibbles = (U32x8{} + words[i]) >> (U32x8){0, 4, 8, 12, 16, 20, 24, 28};
    const F32x8 sizes = __builtin_convertvector(I32x8(nibbles & 7), F32x8);
    const U32x8 signed_values = U32x8(sizes) | (nibbles & 8) << 28;
    memcpy(out + 8 * i, &signed_values, sizeof signed_values);
  }
}

// Compute the noise of elements [first, first + n) as float32, and return a pointer to the noise of element `first` in
// `out`. `out` is filled from the largest multiple of 8 that is not above `first`.
const float *gaussian_values(uint64_t first, int64_t n, uint64_t seed, std::vector<float> &out,
                             std::vector<uint32_t> &words) {
  uint64_t counter = first / 8, skipped = first % 8;
  int64_t count = (int64_t(skipped) + n + 7) / 8;
  words.resize(size_t(count));
  out.resize(size_t(8 * count));
  gaussian(counter, count, seed, words.data());
  unpack_words(words.data(), count, out.data());
  return out.data() + skipped;
}
// Return `uniform_value` of 16 elements before it is rounded.
FB_INLINE F32x16 uniform(const uint16_t *high) { return (number(load_bits(high)) + 0.5f) * 1.52587890625e-05f - 0.5f; }
const float *uniform_values(uint64_t first, int64_t n, uint64_t seed, std::vector<float> &out,
                            std::vector<uint16_t> &high) {
  uint64_t skipped = first % 8;
  int64_t count = int64_t(skipped) + n;
  high.resize(size_t(count) + PIECE);
  out.resize(size_t(count));
  fill_high(first - skipped, count, seed, high.data(), NOISE);
  float *to = out.data();
  each_vector(count, [&](int64_t i, auto lanes) FB_INLINED {
    store(to + i, rounded(uniform(high.data() + i), (const bf16 *)nullptr), lanes);
  });
  return to + skipped;
}

// Compute z / 2 for a Box-Muller pair of normal numbers z, with polynomials accurate to about 2e-7, so that it
// vectorises. The paper's generator "bm" does the same on a GPU with fast intrinsics. Only benchmarks use it, never
// training.
FB_HD void box_muller(uint32_t a, uint32_t b, float *z0, float *z1) {
  float u = (float(int32_t(a >> 8)) + 0.5f) * 5.9604645e-08f;
  uint32_t ub = bits(u);
  float m = value((ub & 0x7fffffu) | 0x3f800000u);
  float e = float(int32_t(ub >> 23) - 127);
  bool big = m > 1.41421356f;
  m = big ? m * 0.5f : m;
  e = big ? e + 1.0f : e;
  float t = (m - 1.0f) / (m + 1.0f), t2 = t * t;
  float log_m = t * (2.0f + t2 * (0.66666667f + t2 * (0.4f + t2 * (0.28571429f + t2 * 0.22222222f))));
  float radius = sqrtf(-2.0f * (e * 0.69314718f + log_m)) * 0.5f;
  float turn = float(int32_t(b >> 8)) * 5.9604645e-08f * 4.0f;  // the angle in quarter turns
  float quarter = float(int32_t(turn + 0.5f)), x = (turn - quarter) * 1.57079633f, x2 = x * x;
  float s = x * (1.0f + x2 * (-0.16666667f + x2 * (0.0083333310f + x2 * -0.00019840874f)));
  float c = 1.0f + x2 * (-0.5f + x2 * (0.041666638f + x2 * (-0.0013888397f + x2 * 2.4760495e-05f)));
  int32_t q = int32_t(quarter);
  float sine = q & 1 ? c : s, cosine = q & 1 ? s : c;
  // Quarter turns change signs as (+, +), (-, +), (-, -), (+, -).
  *z0 = value(bits(radius * cosine) ^ (uint32_t((q + 1) & 2) << 30));
  *z1 = value(bits(radius * sine) ^ (uint32_t(q & 2) << 30));
}
FB_HD uint32_t nibble(float z) {
  float r = (magnitude(z) + 12582912.0f) - 12582912.0f;
  uint32_t size = uint32_t(int32_t(r));
  return size | ((bits(z) >> 31) << 3 & (0u - uint32_t(size != 0)));
}

template <class D> struct Weight {
  const typename D::Storage *w;
  int64_t rows, cols, block;
  const float *bits;
  int64_t across() const { return (cols + block - 1) / block; }

  // Compute max|w| of each square in one row of squares, as float32.
  void amaxes(int64_t r0, int64_t r1, std::vector<typename D::Storage> &columns, std::vector<float> &amax) const {
    columns.assign(size_t(cols), 0);
    for (int64_t r = r0; r < r1; r++) column_maxima<D>(w + r * cols, cols, columns.data());
    amax.resize(size_t(across()));
    for (int64_t b = 0; b < across(); b++) {
      typename D::Storage m = 0;
      for (int64_t c = b * block; c < std::min(cols, (b + 1) * block); c++) m = std::max(m, columns[size_t(c)]);
      amax[size_t(b)] = D::widen(m);
    }
  }
};

struct NoiseScratch {
  std::vector<uint32_t> words;
  std::vector<uint16_t> high;
  std::vector<float> amax, scale, r, sums;
  const float *noise(bool uniform, uint64_t first, int64_t n, uint64_t seed) {
    return uniform ? uniform_values(first, n, seed, r, high) : gaussian_values(first, n, seed, r, words);
  }
};

// Call f(element, column, n) for runs of n elements in rows r0 … r1 - 1, short enough that their noise stays in the L1
// cache. Meanwhile the weights of the next row of squares are prefetched, because `amaxes` would wait for them.
template <class D, class F> void each_chunk(const Weight<D> &weight, int64_t r0, int64_t r1, F f) {
  for (int64_t r = r0; r < r1; r++)
    for (int64_t c = 0; c < weight.cols; c += CHUNK) {
      const int64_t at = r * weight.cols + c, n = std::min(CHUNK, weight.cols - c), next = r + weight.block;
      if (next < weight.rows)
        for (int64_t i = 0; i < n; i += 64 / int64_t(sizeof(*weight.w)))
          __builtin_prefetch(weight.w + at + weight.block * weight.cols + i, 0, 2);
      f(at, c, n);
    }
}

// Round v to O; NaN stays NaN. O::narrow adds integers to round, so NaN whose bits are nearly all ones would become 0.
template <class O> FB_INLINE Cell<O> narrow_any(float v) {
  const Cell<O> nan = O::inf | O::inf >> 1;
  return v == v ? O::narrow(v) : nan;
}
// Compute to = w + noise · scale for n elements.
template <class D, class O>
void add_noise(const typename D::Storage *__restrict w, const float *__restrict noise, const float *__restrict scale,
               int64_t n, typename O::Storage *__restrict to) {
  int64_t first = 0;
#ifdef FB_CONVERTS_BF16
  if (std::is_same<O, Bf16>())
    for (; first + 2 * LANES <= n; first += 2 * LANES) {
      alignas(64) float sums[2 * LANES];
      for (int k = 0; k < 2 * LANES; k++) sums[k] = D::widen(w[first + k]) + noise[first + k] * scale[first + k];
      const __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + LANES);
      if (converts(low) && converts(high))
        _mm512_storeu_si512(to + first, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      else
        for (int k = 0; k < 2 * LANES; k++) to[first + k] = narrow_any<O>(sums[k]);
    }
#endif
  for (int64_t i = first; i < n; i++) to[i] = narrow_any<O>(D::widen(w[i]) + noise[i] * scale[i]);
}

template <class D, class O>
void sample(const Weight<D> &weight, uint64_t seed, bool uniform, typename O::Storage *out, int threads) {
  int64_t rows = weight.rows, cols = weight.cols, block = weight.block, bands = (rows + block - 1) / block;
  const bool around = exceeds_caches<O>(rows, cols);
  in_parallel(bands, threads, [&](int64_t count) {
    NoiseScratch s;
    std::vector<typename D::Storage> columns;
#pragma omp for schedule(static)
    for (int64_t band = 0; band < count; band++) {
      int64_t r0 = band * block, r1 = std::min(rows, r0 + block), across = weight.across();
      weight.amaxes(r0, r1, columns, s.amax);
      s.scale.resize(size_t(cols));
      for (int64_t b = 0; b < across; b++) {
        float factor = noise_scale(weight.bits[band * across + b], s.amax[size_t(b)]);
        std::fill(s.scale.begin() + b * block, s.scale.begin() + std::min(cols, (b + 1) * block), factor);
      }
      each_chunk(weight, r0, r1, [&](int64_t at, int64_t c, int64_t n) {
        alignas(64) Cell<O> sums[CHUNK];
        add_noise<D, O>(weight.w + at, s.noise(uniform, uint64_t(at), n, seed), s.scale.data() + c, n, sums);
        put(out + at, sums, size_t(n) * sizeof(Cell<O>), around);
      });
    }
  });
}

template <class D, class G>
void sample_backward(const Weight<D> &weight, const typename G::Storage *grad, uint64_t seed, bool uniform, float *out,
                     int threads) {
  int64_t rows = weight.rows, block = weight.block, bands = (rows + block - 1) / block;
  in_parallel(bands, threads, [&](int64_t count) {
    NoiseScratch s;
    std::vector<typename D::Storage> columns;
#pragma omp for schedule(static)
    for (int64_t band = 0; band < count; band++) {
      int64_t r0 = band * block, r1 = std::min(rows, r0 + block), across = weight.across();
      weight.amaxes(r0, r1, columns, s.amax);
      s.sums.assign(size_t(across * block), 0.0f);
      each_chunk(weight, r0, r1, [&](int64_t at, int64_t c, int64_t n) {
        const float *__restrict noise = s.noise(uniform, uint64_t(at), n, seed);
        const typename G::Storage *__restrict g = grad + at;
        float *__restrict sums = s.sums.data() + c;
        for (int64_t i = 0; i < n; i++) sums[i] += G::widen(g[i]) * noise[i];
      });
      for (int64_t b = 0; b < across; b++) {
        float *v = s.sums.data() + b * block;
        for (int64_t half = block / 2; half > 0; half /= 2)
          for (int64_t c = 0; c < half; c++) v[c] += v[c + half];
        float factor = noise_scale(weight.bits[band * across + b], s.amax[size_t(b)]);
        out[band * across + b] = bits_gradient(factor, v[0]);
      }
    }
  });
}

}  // namespace
}  // namespace fb

extern "C" {

void fb_gaussian_noise(int64_t words, uint64_t seed, uint32_t *out, int threads) {
  fb::in_parallel((words + fb::BATCH - 1) / fb::BATCH, threads, [&](int64_t count) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++)
      fb::gaussian(uint64_t(i * fb::BATCH), std::min(fb::BATCH, words - i * fb::BATCH), seed, out + i * fb::BATCH);
  });
}

void fb_uniform_noise(int64_t n, uint64_t seed, uint16_t *out, int threads) {
  fb::in_parallel((n + fb::BATCH - 1) / fb::BATCH, threads, [&](int64_t count) {
    uint16_t high[fb::BATCH + 2 * fb::PIECE];
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) {
      int64_t m = std::min(fb::BATCH, n - i * fb::BATCH);
      fb::fill_high(uint64_t(i * fb::BATCH), m, seed, high, fb::NOISE);
      fb::each_vector(m, [&](int64_t k, auto lanes)
                             FB_INLINED { fb::store(out + i * fb::BATCH + k, fb::uniform(high + k), lanes); });
    }
  });
}

void fb_box_muller(int64_t words, uint64_t seed, uint32_t *out, int threads) {
  fb::in_parallel((words + fb::BATCH - 1) / fb::BATCH, threads, [&](int64_t count) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) {
      int64_t m = std::min(fb::BATCH, words - i * fb::BATCH);
      for (int64_t k = 0; k < m; k += fb::REGISTER) {  // two outputs of Philox give four pairs, the values of a word
        uint32_t u[8][fb::REGISTER], packed[fb::REGISTER] = {};
        for (uint64_t half = 0; half < 2; half++) {
          fb::U32Part words_of_half[1][4];
          fb::draw_words(uint64_t(i * fb::BATCH + k) | half << 63, fb::NOISE, seed, words_of_half);
          memcpy(u[4 * half], words_of_half, sizeof words_of_half);
        }
        for (int pair = 0; pair < 4; pair++)
          for (int lane = 0; lane < fb::REGISTER; lane++) {
            float z0, z1;
            fb::box_muller(u[2 * pair][lane], u[2 * pair + 1][lane], &z0, &z1);
            packed[lane] |= fb::nibble(z0) << (8 * pair) | fb::nibble(z1) << (8 * pair + 4);
          }
        memcpy(out + i * fb::BATCH + k, packed, size_t(std::min<int64_t>(fb::REGISTER, m - k)) * 4);
      }
    }
  });
}

void fb_sample_weight(const void *w, int dtype, int64_t rows, int64_t cols, int64_t block, const float *bits,
                      uint64_t seed, int uniform, void *out, int out_dtype, int threads) {
  fb::with_dtype(dtype, [&](auto d) {
    fb::with_dtype(out_dtype, [&](auto o) {
      typedef decltype(d) D;
      typedef decltype(o) O;
      fb::Weight<D> weight{(const typename D::Storage *)w, rows, cols, block, bits};
      fb::sample<D, O>(weight, seed, uniform, (typename O::Storage *)out, threads);
    });
  });
}

void fb_sample_weight_backward(const void *grad, int grad_dtype, const void *w, int dtype, int64_t rows, int64_t cols,
                               int64_t block, const float *bits, uint64_t seed, int uniform, float *out, int threads) {
  fb::with_dtype(dtype, [&](auto d) {
    fb::with_dtype(grad_dtype, [&](auto g) {
      typedef decltype(d) D;
      typedef decltype(g) G;
      fb::Weight<D> weight{(const typename D::Storage *)w, rows, cols, block, bits};
      fb::sample_backward<D, G>(weight, (const typename G::Storage *)grad, seed, uniform, out, threads);
    });
  });
}
}
