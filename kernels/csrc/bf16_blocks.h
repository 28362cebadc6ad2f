// The common part of those products of 32 x 32 blocks that store BF16 values as BF16, in pairs of rows (tile_blocks.h,
// pair_blocks.h).
#pragma once
#include "blocks.h"

namespace fb {

struct Bf16Blocks {
  typedef bf16 Element;

  static FB_INLINE void put(bf16 *to, const F32x16 &v) { store(to, v); }
  static FB_INLINE U32x16 pairs(const bf16 *first, const bf16 *second) {
    return load_bits(first) | load_bits(second) << 16u;
  }
  // rows and columns are multiples of 32, strides even.
  static void transpose(const bf16 *from, int64_t stride, int64_t rows, int64_t columns, bf16 *to, int64_t to_stride) {
    for (int64_t r = 0; r < rows; r += BLOCK)
      for (int64_t c = 0; c < columns; c += LANES) {
        uint32_t words[16 * LANES];  // 16 pairs of rows
        for (int64_t p = 0; p < 16; p++) {
          const bf16 *row = from + (r + 2 * p) * stride + c;
          store(words + p * LANES, pairs(row, row + stride));
        }
        fb::transpose(words, LANES, 16, LANES, (uint32_t *)(to + c * to_stride + r), to_stride / 2);
      }
  }
};

}  // namespace fb
