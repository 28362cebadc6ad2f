// Products of blocks of 32 x 32 sums with the interface of blocks.h, on AMX.
//
// A panel of B consists of two tiles for every 32 rows k; a tile has 16 pairs of rows and 16 columns. AMX adds the
// products in another order than the vector units and replaces subnormals by zeros, so the last bits of its results
// differ.
#pragma once
#include "bf16_blocks.h"
#include "tiles.h"

#ifdef FB_TILES

namespace fb {

struct TileBlocks : Bf16Blocks {
  typedef tiles::Session Session;
  static constexpr int64_t TILE = 16 * 32;  // the number of elements of a tile

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
  template <int HALF>
  static void multiply_half(const bf16 *a, int64_t stride, const bf16 *panel, int64_t k, float *c, int64_t c_stride) {
    tiles::zero_half<HALF>();
    for (int64_t i = 0; i < k; i += BLOCK, panel += 2 * TILE)
      tiles::add_half<HALF>(a + 16 * HALF * stride + i, stride * int64_t(sizeof(bf16)), panel);
    tiles::store_half<HALF>(c + 16 * HALF * c_stride, c_stride);
  }
};

}  // namespace fb

#endif
