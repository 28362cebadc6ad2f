// Products of blocks of 32 x 32 sums, C = A · B or C += A · B, of BF16 values with float32 sums, on the vector units.
//
// A is row-major. B is packed in panels of 32 columns with all rows. This implementation stores BF16 values as floats.
// The product of two BF16 values is exact in float32 unless it underflows, so a fused multiply-add gives the same bits
// as a product and a sum; it is used if the processor has one. Each sum adds its products in the order of k.
#pragma once
#include "transpose.h"
#include "vector.h"

namespace fb {

constexpr int64_t BLOCK = 32;  // rows and columns of a block, and the unit of k

FB_INLINE F32x16::Part multiply_add(F32x16::Part a, F32x16::Part b, F32x16::Part sum) {
#if defined(__AVX512BW__)
  return F32x16::Part(_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum));
#elif defined(__AVX2__) && defined(__FMA__)
  return F32x16::Part(_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum));
#else
  return sum + a * b;
#endif
}

// Make the compiler load x into a register once; otherwise every instruction that uses x would read it from memory.
FB_INLINE void in_register(F32x16::Part &x) {
#if defined(__x86_64__)
  __asm__("" : "+v"(x));
#else
  (void)x;
#endif
}

struct VectorBlocks {
  typedef float Element;
  struct Session {  // exists while a thread multiplies
    Session() {}
  };

  static FB_INLINE void put(float *to, const F32x16 &v) { store(to, rounded(v, (const bf16 *)nullptr)); }

  // Pack a panel of B: from rows of B (k rows of at least 32 elements), or from rows of Bᵀ, the columns of B (32 rows
  // of k elements).
  static void pack_rows(const float *from, int64_t stride, int64_t k, float *panel) {
    for (int64_t i = 0; i < k; i++) memcpy(panel + i * BLOCK, from + i * stride, BLOCK * sizeof(float));
  }
  static void pack_columns(const float *from, int64_t stride, int64_t k, float *panel) {
    fb::transpose((const uint32_t *)from, stride, BLOCK, k, (uint32_t *)panel, BLOCK);
  }
  static void transpose(const float *from, int64_t stride, int64_t rows, int64_t columns, float *to,
                        int64_t to_stride) {
    fb::transpose((const uint32_t *)from, stride, rows, columns, (uint32_t *)to, to_stride);
  }

  // A strip of sums stays in registers: 4 rows of one vector fill 8 of AVX2's 16 registers, which hides the latency.
  static constexpr int ROWS = REGISTER == 16 ? 8 : 4, VECTORS = REGISTER == 16 ? 2 : 1, STRIP = VECTORS * PARTS;

  template <bool ADD>
  static FB_INLINE void strip(const float *a, int64_t stride, const float *b, int64_t k, float *c, int64_t c_stride) {
    typedef F32x16::Part Part;
    Part sum[ROWS][STRIP];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
      for (int p = 0; p < STRIP; p++)
        if (ADD)
          memcpy(&sum[r][p], c + r * c_stride + p * REGISTER, sizeof(Part));
        else
          sum[r][p] = Part{};
    for (int64_t i = 0; i < k; i++, b += BLOCK) {
      Part right[STRIP];
#pragma GCC unroll 16
      for (int p = 0; p < STRIP; p++) memcpy(&right[p], b + p * REGISTER, sizeof(Part)), in_register(right[p]);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        Part left = a[r * stride + i] - Part{};
#pragma GCC unroll 16
        for (int p = 0; p < STRIP; p++) sum[r][p] = multiply_add(left, right[p], sum[r][p]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
      for (int p = 0; p < STRIP; p++) memcpy(c + r * c_stride + p * REGISTER, &sum[r][p], sizeof(Part));
  }
  // k is a multiple of 32. multiply_half computes the first (HALF = 0) or last (HALF = 1) 16 of the 32 rows of sums.
  template <bool ADD>
  static void multiply(const float *a, int64_t stride, const float *panel, int64_t k, float *c, int64_t c_stride) {
    for (int64_t n = 0; n < BLOCK; n += STRIP * REGISTER)
      for (int64_t m = 0; m < BLOCK; m += ROWS)
        strip<ADD>(a + m * stride, stride, panel + n, k, c + m * c_stride + n, c_stride);
  }
  template <int HALF>
  static void multiply_half(const float *a, int64_t stride, const float *panel, int64_t k, float *c, int64_t c_stride) {
    for (int64_t n = 0; n < BLOCK; n += STRIP * REGISTER)
      for (int64_t m = 16 * HALF; m < 16 * HALF + 16; m += ROWS)
        strip<false>(a + m * stride, stride, panel + n, k, c + m * c_stride + n, c_stride);
  }
};

}  // namespace fb
