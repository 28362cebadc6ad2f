// Transposes matrices of 32-bit words in squares of 4 x 4, or with AVX-512 of 16 x 16.
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

namespace fb {

typedef uint32_t U32x4 __attribute__((vector_size(16)));
#ifdef __clang__
#define FB_SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FB_SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, (U32x4){__VA_ARGS__})
#endif

#ifdef __AVX512BW__
// Transpose a 16 x 16 square. x[j] has columns 4q to 4q + 3 of rows j, j + 4, j + 8 and j + 12, so that transposing its
// 4 x 4 squares gives rows 4q to 4q + 3 of the result.
inline void transpose_square(const uint32_t *from, int64_t from_stride, uint32_t *to, int64_t to_stride) {
#pragma GCC unroll 4
  for (int q = 0; q < 4; q++) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      auto four = [&](int row) { return _mm_loadu_si128((const __m128i *)(from + row * from_stride + 4 * q)); };
      x[j] = _mm512_castsi128_si512(four(j));
      x[j] = _mm512_mask_broadcast_i32x4(x[j], 0x00f0, four(j + 4));
      x[j] = _mm512_mask_broadcast_i32x4(x[j], 0x0f00, four(j + 8));
      x[j] = _mm512_mask_broadcast_i32x4(x[j], 0xf000, four(j + 12));
    }
    const __m512i low01 = _mm512_unpacklo_epi32(x[0], x[1]), high01 = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(x[2], x[3]), high23 = _mm512_unpackhi_epi32(x[2], x[3]);
    uint32_t *row = to + 4 * q * to_stride;
    _mm512_storeu_si512(row, _mm512_unpacklo_epi64(low01, low23));
    _mm512_storeu_si512(row + to_stride, _mm512_unpackhi_epi64(low01, low23));
    _mm512_storeu_si512(row + 2 * to_stride, _mm512_unpacklo_epi64(high01, high23));
    _mm512_storeu_si512(row + 3 * to_stride, _mm512_unpackhi_epi64(high01, high23));
  }
}
#endif

// to[column][row] = from[row][column]; rows and columns are multiples of 4, strides are in words.
inline void transpose(const uint32_t *from, int64_t from_stride, int64_t rows, int64_t columns, uint32_t *to,
                      int64_t to_stride) {
#ifdef __AVX512BW__
  if (rows % 16 == 0 && columns % 16 == 0) {
    for (int64_t r = 0; r < rows; r += 16)
      for (int64_t c = 0; c < columns; c += 16)
        transpose_square(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
    return;
  }
#endif
  for (int64_t r = 0; r < rows; r += 4)
    for (int64_t c = 0; c < columns; c += 4) {
      U32x4 x[4];
      for (int i = 0; i < 4; i++) memcpy(&x[i], from + (r + i) * from_stride + c, sizeof x[i]);
      U32x4 low01 = FB_SHUFFLE4(x[0], x[1], 0, 4, 1, 5), high01 = FB_SHUFFLE4(x[0], x[1], 2, 6, 3, 7);
      U32x4 low23 = FB_SHUFFLE4(x[2], x[3], 0, 4, 1, 5), high23 = FB_SHUFFLE4(x[2], x[3], 2, 6, 3, 7);
      U32x4 y[4] = {FB_SHUFFLE4(low01, low23, 0, 1, 4, 5), FB_SHUFFLE4(low01, low23, 2, 3, 6, 7),
                    FB_SHUFFLE4(high01, high23, 0, 1, 4, 5), FB_SHUFFLE4(high01, high23, 2, 3, 6, 7)};
      for (int i = 0; i < 4; i++) memcpy(to + (c + i) * to_stride + r, &y[i], sizeof y[i]);
    }
}

}  // namespace fb
