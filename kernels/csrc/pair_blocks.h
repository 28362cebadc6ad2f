// Products of blocks of 32 x 32 sums with the interface of blocks.h, by the instructions of AVX512-BF16.
//
// One instruction adds the two products of a pair (k, k + 1) to each of 16 sums. The order is that of gemm_pairs.h, not
// that of blocks.h. A panel of B is, for every pair of rows k and k + 1, the pairs of all 32 columns.
#pragma once
#include "bf16_blocks.h"
#include "gemm_pairs.h"

#ifdef __AVX512BF16__

namespace fb {

struct PairBlocks : Bf16Blocks {
  struct Session {  // empty, because the instructions themselves replace subnormals by zeros
    Session() {}
  };

  static void pack_rows(const bf16 *from, int64_t stride, int64_t k, bf16 *panel) {
    for (int64_t i = 0; i < k; i += 2, from += 2 * stride)
      for (int64_t half = 0; half < BLOCK; half += LANES, panel += 2 * LANES)
        store((uint32_t *)panel, pairs(from + half, from + half + stride));
  }
  static void pack_columns(const bf16 *from, int64_t stride, int64_t k, bf16 *panel) {
    fb::transpose((const uint32_t *)from, stride / 2, BLOCK, k / 2, (uint32_t *)panel, BLOCK);
  }

  static constexpr int ROWS = 8;  // 8 rows of two vectors of sums hide the latency

  template <bool ADD>
  static FB_INLINE void strip(const bf16 *a, int64_t stride, const bf16 *b, int64_t k, float *c, int64_t c_stride) {
    __m512 sum[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) sum[r][v] = ADD ? _mm512_loadu_ps(c + r * c_stride + 16 * v) : _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += 2, b += 2 * BLOCK) {
      const __m512i left = _mm512_loadu_si512(b), right = _mm512_loadu_si512(b + BLOCK);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        int32_t pair;
        memcpy(&pair, a + r * stride + i, sizeof pair);
        const __m512i row = _mm512_set1_epi32(pair);
        sum[r][0] = add_products(sum[r][0], row, left);
        sum[r][1] = add_products(sum[r][1], row, right);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) _mm512_storeu_ps(c + r * c_stride + 16 * v, sum[r][v]);
  }
  // k is a multiple of 32.
  template <bool ADD>
  static void multiply(const bf16 *a, int64_t stride, const bf16 *panel, int64_t k, float *c, int64_t c_stride) {
    for (int64_t m = 0; m < BLOCK; m += ROWS) strip<ADD>(a + m * stride, stride, panel, k, c + m * c_stride, c_stride);
  }
  template <int HALF>
  static void multiply_half(const bf16 *a, int64_t stride, const bf16 *panel, int64_t k, float *c, int64_t c_stride) {
    for (int64_t m = 16 * HALF; m < 16 * HALF + 16; m += ROWS)
      strip<false>(a + m * stride, stride, panel, k, c + m * c_stride, c_stride);
  }
};

}  // namespace fb

#endif
