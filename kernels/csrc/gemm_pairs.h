// Panels and tiles of gemm.h for AVX-512: one instruction multiplies pairs (k, k + 1), which are adjacent in a panel.
#pragma once
#include "gemm.h"

#ifdef __AVX512BW__

namespace fb {

inline __mmask16 first_lanes(int64_t n) { return n >= 16 ? 0xffff : n > 0 ? __mmask16((1u << n) - 1) : 0; }

// Transpose a 16 x 16 matrix of 32-bit words in four steps: for d = 1, 2, 4, 8, swap the two off-diagonal d x d
// quarters of each 2d x 2d square.
inline void transpose(__m512i (&x)[16]) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int d = 1; d < 16; d *= 2) {
    __mmask16 upper = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(d));
    __m512i low = _mm512_mask_add_epi32(lane, upper, lane, _mm512_set1_epi32(16 - d));
    __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(d));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      if (!(i & d)) {
        __m512i above = x[i], below = x[i + d];
        x[i] = _mm512_permutex2var_epi32(above, low, below);
        x[i + d] = _mm512_permutex2var_epi32(above, high, below);
      }
  }
}

// Return round(round(sum + odd · odd) + even · even), where odd and even are the upper and lower BF16 value of each
// word of a and b. Subnormal operands and results count as zeros: AVX512-BF16 does this, and on processors without it
// PairKernel::Session sets the mode that does the same.
inline __m512 add_products(__m512 sum, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
  auto odd = [&](__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, upper)); };
  auto even = [](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
  return _mm512_fmadd_ps(even(a), even(b), _mm512_fmadd_ps(odd(a), odd(b), sum));
#endif
}

// The sizes were chosen by measurements on Zen 4, which multiplies one vector of pairs per cycle: 16 vectors of sums
// hide the latency, the sizes of most layers are multiples of 8 rows, the panel of B stays in the L1 cache and the
// block of A in L2.
struct PairKernel {
  typedef uint16_t Element;
  static constexpr int64_t ROWS = 8, VECTORS = 2, COLS = 16 * VECTORS, UNIT = 2, K_BLOCK = 512, LARGEST_BLOCK = 1024;
  static constexpr int64_t RUN = 16;  // pairs, a cache line along k, that are packed before the next panel follows

  struct Session {
    Session() { _mm_setcsr(_mm_getcsr() | 0x8040); }  // subnormals are zeros; in_parallel restores the mode
  };

  static void pack_left(const Operand &x, int64_t outers, int64_t ks, Element *to) { pack<ROWS>(x, outers, ks, to); }
  static void pack_right(const Operand &x, int64_t outers, int64_t ks, Element *to) { pack<COLS>(x, outers, ks, to); }

  // Add the product of a panel of A and a panel of B to c, of which rows x cols elements are in the matrix. `begin`:
  // start from 0, because c is not initialised yet.
  static void tile(const Element *left, const Element *right, int64_t depth, float *c, int64_t stride, int64_t rows,
                   int64_t cols, bool begin) {
    const uint32_t *a = (const uint32_t *)left, *b = (const uint32_t *)right;
    __m512 sum[ROWS][VECTORS];
    auto kept = [&](int64_t i, int64_t v) { return i < rows ? first_lanes(cols - 16 * v) : __mmask16(0); };
#pragma GCC unroll 16
    for (int64_t i = 0; i < ROWS; i++)
#pragma GCC unroll 16
      for (int64_t v = 0; v < VECTORS; v++)
        sum[i][v] = _mm512_maskz_loadu_ps(begin ? __mmask16(0) : kept(i, v), c + i * stride + 16 * v);
    for (int64_t p = 0; p < depth / 2; p++, a += ROWS, b += COLS) {
      __m512i columns[VECTORS];
#pragma GCC unroll 16
      for (int64_t v = 0; v < VECTORS; v++) columns[v] = _mm512_load_si512(b + 16 * v);
#pragma GCC unroll 16
      for (int64_t i = 0; i < ROWS; i++) {
        __m512i row = _mm512_set1_epi32(int(a[i]));
#pragma GCC unroll 16
        for (int64_t v = 0; v < VECTORS; v++) sum[i][v] = add_products(sum[i][v], row, columns[v]);
      }
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < ROWS; i++)
#pragma GCC unroll 16
      for (int64_t v = 0; v < VECTORS; v++) _mm512_mask_storeu_ps(c + i * stride + 16 * v, kept(i, v), sum[i][v]);
  }

 private:
  template <int64_t WIDTH> static void pack(const Operand &x, int64_t outers, int64_t ks, Element *to) {
    int64_t pairs = (ks + 1) / 2;
    for (int64_t first = 0; first < pairs; first += RUN)
      for (int64_t i = 0; i < outers; i += WIDTH)
        pack_panel<WIDTH>(x.from(i, 0), std::min(WIDTH, outers - i), ks, first, std::min(pairs, first + RUN),
                          (uint32_t *)to + i * pairs);
  }

  // Pack the pairs first … last - 1 (at most RUN) of one panel. A panel has WIDTH rows of A or columns of B, of which
  // the first `present` are in the matrix; each has `ks` elements along k.
  template <int64_t WIDTH>
  static void pack_panel(const Operand &x, int64_t present, int64_t ks, int64_t first, int64_t last, uint32_t *out) {
    for (int64_t i = 0; i < WIDTH; i += RUN) {
      __m512i pairs[RUN];
      if (x.outer == 1) {
        __mmask16 in = first_lanes(present - i);
        for (int64_t p = first; p < last; p++) {
          const uint16_t *even = x.at(i, 2 * p);
          __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(in, even));
          __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(2 * p + 1 < ks ? in : 0, even + x.inner));
          pairs[p - first] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
        }
      } else {
        __mmask32 in = ks - 2 * first >= 32 ? ~0u : (1u << (ks - 2 * first)) - 1;
        for (int64_t l = 0; l < RUN; l++)
          pairs[l] = _mm512_maskz_loadu_epi16(i + l < present ? in : 0, x.at(i + l, 2 * first));
        transpose(pairs);
      }
      for (int64_t p = first; p < last; p++)
        _mm512_mask_storeu_epi32(out + p * WIDTH + i, first_lanes(WIDTH - i), pairs[p - first]);
    }
  }
};

}  // namespace fb

#endif
