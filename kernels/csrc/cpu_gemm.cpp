// C = A · B of BF16 matrices with an FP32 result, on processors with AVX-512.
//
// This is Goto's algorithm. Both operands are packed, K_BLOCK of the summed dimension at a time, into panels of ROWS
// rows of A and COLS columns of B. In a panel, the pairs (k, k + 1) that one instruction multiplies are adjacent;
// elements beyond the matrix are zeros. A tile of ROWS x COLS sums stays in registers while a panel of A and one of B
// are read. Each sum adds its pairs in the order of k for every division into tiles, blocks and threads, so the bits do
// not depend on that division.
#include <stdint.h>
#include <algorithm>
#include <memory>
#include "parallel.h"

#ifdef __AVX512BW__

namespace fb {

// Chosen by measurements on Zen 4, which multiplies one vector of pairs per cycle: 16 vectors of sums hide the latency,
// the sizes of most layers are multiples of 8 rows, the panel of B stays in the L1 cache and the block of A in L2.
constexpr int64_t ROWS = 8, VECTORS = 2, COLS = 16 * VECTORS, K_BLOCK = 512, LARGEST_BLOCK = 1024;
constexpr int64_t RUN = 16;  // pairs that are packed before the next panel's turn: a cache line if k is contiguous

struct alignas(64) Line {
  uint32_t pair[16];
};

// A as M x K, or B as N x K. `outer` is the stride of M or N, `inner` that of K; one of the two is 1.
struct Operand {
  const uint16_t *data;
  int64_t outer, inner;
  const uint16_t *at(int64_t o, int64_t k) const { return data + o * outer + k * inner; }
};

// The part of the product that is computed at a time.
struct Block {
  int64_t m, n, k, ms, ns, ks;  // m, n, k: its start; ms, ns, ks: its sizes
  int64_t pairs() const { return (ks + 1) / 2; }
};

inline int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }
inline __mmask16 first_lanes(int64_t n) { return n >= 16 ? 0xffff : n > 0 ? __mmask16((1u << n) - 1) : 0; }

// Transpose a 16 x 16 matrix of values in log2(16) steps: for d = 1, 2, 4, 8, swap the two off-diagonal d x d quarters
// of each 2d x 2d square.
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

// Pack pairs first … last - 1 (at most RUN) of one panel. `present` of the panel's WIDTH lines are in the matrix; each
// has `ks` elements.
template <int64_t WIDTH>
void pack_panel(const Operand &x, int64_t present, int64_t ks, int64_t first, int64_t last, uint32_t *out) {
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

template <int64_t WIDTH> void pack(const Operand &x, int64_t o, int64_t outers, int64_t k, int64_t ks, uint32_t *out) {
  int64_t pairs = (ks + 1) / 2;
  for (int64_t first = 0; first < pairs; first += RUN)
    for (int64_t i = 0; i < outers; i += WIDTH)
      pack_panel<WIDTH>(Operand{x.at(o + i, k), x.outer, x.inner}, std::min(WIDTH, outers - i), ks, first,
                        std::min(pairs, first + RUN), out + i * pairs);
}

// Return sum + odd · odd, rounded, + even · even, rounded. Subnormal operands and results count as zeros: AVX512-BF16
// does so, and `matmul` sets processors without it to do the same.
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

// Add the product of a panel of A and one of B to c, of which rows x cols are in the matrix. `begin`: start from 0,
// because c is not initialised yet.
inline void tile(const uint32_t *a, const uint32_t *b, int64_t pairs, float *c, int64_t stride, int64_t rows,
                 int64_t cols, bool begin) {
  __m512 sum[ROWS][VECTORS];
  auto kept = [&](int64_t i, int64_t v) { return i < rows ? first_lanes(cols - 16 * v) : __mmask16(0); };
#pragma GCC unroll 16
  for (int64_t i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int64_t v = 0; v < VECTORS; v++)
      sum[i][v] = _mm512_maskz_loadu_ps(begin ? __mmask16(0) : kept(i, v), c + i * stride + 16 * v);
  for (int64_t p = 0; p < pairs; p++, a += ROWS, b += COLS) {
    __m512i right[VECTORS];
#pragma GCC unroll 16
    for (int64_t v = 0; v < VECTORS; v++) right[v] = _mm512_load_si512(b + 16 * v);
#pragma GCC unroll 16
    for (int64_t i = 0; i < ROWS; i++) {
      __m512i left = _mm512_set1_epi32(int(a[i]));
#pragma GCC unroll 16
      for (int64_t v = 0; v < VECTORS; v++) sum[i][v] = add_products(sum[i][v], left, right[v]);
    }
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int64_t v = 0; v < VECTORS; v++) _mm512_mask_storeu_ps(c + i * stride + 16 * v, kept(i, v), sum[i][v]);
}

void multiply(const Operand &a, const Operand &b, const Block &at, float *c, int64_t stride, uint32_t *left,
              uint32_t *right) {
  int64_t pairs = at.pairs();
  pack<ROWS>(a, at.m, at.ms, at.k, at.ks, left);
  pack<COLS>(b, at.n, at.ns, at.k, at.ks, right);
  for (int64_t j = 0; j < at.ns; j += COLS)
    for (int64_t i = 0; i < at.ms; i += ROWS)
      tile(left + i * pairs, right + j * pairs, pairs, c + (at.m + i) * stride + at.n + j, stride, at.ms - i, at.ns - j,
           at.k == 0);
}

// The size of equal parts, rounded up to a multiple of `unit`. There are `parts` parts, or a multiple of that number if
// the parts would be larger than LARGEST_BLOCK.
inline int64_t part(int64_t size, int64_t parts, int64_t unit) {
  return ceil_div(ceil_div(size, parts * ceil_div(size, parts * LARGEST_BLOCK)), unit) * unit;
}

// Return memory for at least `size` vectors (at most 2 MiB). The thread keeps it, so that its next product does not
// wait for new pages.
inline Line *room(int64_t size) {
  static thread_local std::unique_ptr<Line[]> lines;
  static thread_local int64_t kept = 0;
  if (kept < size) lines.reset(), lines.reset(new Line[size_t(size)]), kept = size;
  return lines.get();
}

// Threads divide the blocks of C among themselves. Each thread packs its own operands, because packing an operand twice
// costs less than synchronising.
void matmul(const Operand &a, const Operand &b, int64_t M, int64_t N, int64_t K, float *c, int threads) {
  auto packed = [&](int64_t d) {
    return M / d + N / (threads / d);
  };  // lines that each thread packs if d threads divide the rows
  int down = 1;
  for (int d = 2; d <= threads; d++)
    if (threads % d == 0 && packed(d) < packed(down)) down = d;
  int64_t m_block = part(M, down, ROWS), n_block = part(N, threads / down, COLS), across = ceil_div(N, n_block);
  int64_t k_block = std::min(K_BLOCK, ceil_div(K, 2) * 2);
  int64_t left = ceil_div(m_block * k_block / 2, 16), right = ceil_div(n_block * k_block / 2, 16);
  in_parallel(ceil_div(M, m_block) * across, threads, [&](int64_t count) {
    _mm_setcsr(_mm_getcsr() | 0x8040);  // subnormals are zeros, see add_products
    Line *lines = room(left + right);
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < count; i++) {
      int64_t m = i / across * m_block, n = i % across * n_block;
      for (int64_t k = 0; k < K; k += K_BLOCK) {
        Block at{m, n, k, std::min(m_block, M - m), std::min(n_block, N - n), std::min(K_BLOCK, K - k)};
        multiply(a, b, at, c, N, lines[0].pair, lines[left].pair);
      }
    }
  });
}

}  // namespace fb

#endif

// Compute c (M x N, contiguous) = a (M x K) · b (K x N). a_m, a_k, b_n and b_k are the strides of a and b along M, K, N
// and K. K is not 0. Return 1; or 0 without a result if the library was compiled for a processor without AVX-512.
extern "C" int fb_matmul_fp32(const void *a, int64_t a_m, int64_t a_k, const void *b, int64_t b_n, int64_t b_k,
                              int64_t M, int64_t N, int64_t K, float *c, int threads) {
#ifdef __AVX512BW__
  fb::matmul(fb::Operand{(const uint16_t *)a, a_m, a_k}, fb::Operand{(const uint16_t *)b, b_n, b_k}, M, N, K, c,
             threads);
  return 1;
#else
  (void)a, (void)a_m, (void)a_k, (void)b, (void)b_n, (void)b_k, (void)M, (void)N, (void)K, (void)c, (void)threads;
  return 0;
#endif
}
