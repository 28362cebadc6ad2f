// Products of blocks of 32 x 32 sums like those of blocks.h, on AMX.
//
// A panel of B is, for every 32 rows k, two tiles of 16 pairs of rows and 16 columns. AMX adds the two products of a
// pair at a time and replaces subnormals by zeros, so its last bits differ from those of the vector units.
#pragma once
#include "blocks.h"
#include "tiles.h"

#ifdef FB_TILES

namespace fb {

struct TileBlocks {
  typedef bf16 Element;
  typedef tiles::Session Session;
  static constexpr int64_t TILE = 16 * 32;  // elements

  static FB_INLINE void put(bf16 *to, const F32x16 &v) { store(to, v); }
  static FB_INLINE U32x16 pairs(const bf16 *first, const bf16 *second) {
    return load_bits(first) | load_bits(second) << 16u;
  }

  static void pack_rows(const bf16 *from, int64_t stride, int64_t k, bf16 *panel) {
    for (int64_t i = 0; i < k; i += BLOCK)
      for (int64_t half = 0; half < 2; half++, panel += TILE)
        for (int64_t p = 0; p < 16; p++) {
          const bf16 *row = from + (i + 2 * p) * stride + 16 * half;
          store((uint32_t *)panel + 16 * p, pairs(row, row + stride));
        }
  }
  static void pack_columns(const bf16 *from, int64_t stride, int64_t k, bf16 *panel) {
    for (int64_t i = 0; i < k; i += BLOCK)
      for (int64_t half = 0; half < 2; half++, panel += TILE)
        fb::transpose((const uint32_t *)(from + 16 * half * stride + i), stride / 2, 16, 16, (uint32_t *)panel, 16);
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

  template <bool ADD>
  static void multiply(const bf16 *a, int64_t stride, const bf16 *panel, int64_t k, float *c, int64_t c_stride) {
    if (ADD)
      tiles::load_sums(c, c_stride);
    else
      tiles::zero_sums();
    for (int64_t i = 0; i < k; i += BLOCK, panel += 2 * TILE)
      tiles::add_product(a + i, stride * int64_t(sizeof(bf16)), panel);
    tiles::store_sums(c, c_stride);
  }
};

}  // namespace fb

#endif
