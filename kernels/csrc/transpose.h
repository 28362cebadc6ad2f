// Transposes matrices of 32-bit words in squares of 4 x 4.
#pragma once
#include <stdint.h>
#include <string.h>

namespace fb {

typedef uint32_t U32x4 __attribute__((vector_size(16)));
#ifdef __clang__
#define FB_SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FB_SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, (U32x4){__VA_ARGS__})
#endif

// to[column][row] = from[row][column]; rows and columns are multiples of 4, strides are in words.
inline void transpose(const uint32_t *from, int64_t from_stride, int64_t rows, int64_t columns, uint32_t *to,
                      int64_t to_stride) {
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
