// Computes the scales of blocks on a GPU from the blocks' amaxes, in registers or in memory, and stores the scales.
// Also accesses a thread's eight slots by an index that is unknown at compile time: their vectors and the values kept
// for their blocks.
#pragma once
#include "arithmetic.cuh"

namespace fb {

struct Block {
  Scale scale;
  bool plain, poisoned;  // plain: the fast path can process it; poisoned: it has an inf or NaN and becomes NaN
};
// True if the fast path can count the statistics of a block's elements, or if no statistics are requested.
template <class D> FB_D bool counts(const Spec &s, float amax, const Scale &scale) {
  return !s.stats || s.grid.wide || countable<D>(s.grid.grid(), amax, scale);
}
// Return the second-level value of the block that contains an element.
FB_D Group group_at(const Spec &s, const Request &r, int row, int col) {
  int rows = s.source == ON_CHIP ? s.block_rows : r.blocks.rows;
  int cols = s.source == ON_CHIP ? s.block_cols : r.blocks.cols;
  int g = s.group ? group_index(s, row / rows, col / cols, r.blocks.across) : 0;
  return make_group(s.scaling, value(s.grid.max), value(r.group_amax[g]));
}
template <class D>
FB_D Block make_block(const Spec &s, const Request &r, uint32_t amax, int row, int col, float expansion = 1.0f) {
  Group group{1.0f, 1.0f};
  if (s.scaling.grouped()) group = group_at(s, r, row, col);
  Block b;
  b.scale = make_scale(s.scaling, value(s.grid.max), value(amax), group, expansion);
  b.poisoned = s.scaling.kind != NONE && amax >= INF;
  const Bounds bounds = ordinary_bounds<D>(s.scaling, s.grid.grid());
  b.plain = !b.poisoned && is_ordinary(s.scaling, value(amax), b.scale, bounds) && counts<D>(s, value(amax), b.scale);
  return b;
}
template <class D> FB_D Block looked_up(const Spec &s, const Request &r, int row, int col) {
  int64_t at = r.blocks.at(row, col);
  bool four = s.scaling.compares() && prefers_four(s.scaling.select, r.four_less_six[at]);
  return make_block<D>(s, r, r.block_amax[at], row, col, four ? value(s.scaling.expansion) : 1.0f);
}

// Operands with scales of one byte: if a part of a thread's patch is at the start of a block along the sum, store the
// block's scale for each of the part's lines. (row, col) is the first element of the part, which is `rows` x `cols`.
FB_D void store_line_scales(const Spec &s, const Request &r, const Block &b, const Tile &t, int row, int col, int rows,
                            int cols) {
  const int first = s.down ? col : row, lines = s.down ? cols : rows, end = s.down ? t.cols : t.rows,
            at = s.down ? row : col, wide = s.down ? s.block_rows : s.block_cols;
  if (at % wide || at >= (s.down ? t.rows : t.cols)) return;
  const uint32_t code = b.poisoned ? s.scaling.nan_code : b.scale.code;
#pragma unroll
  for (int i = 0; i < SLOTS; i++)
    if (i < lines && first + i < end)
      ((uint8_t *)r.scales)[swizzled(first + i, at / wide, r.block_stride)] = uint8_t(code);
}

// Store a block's scale if (row, col) is the block's first element. If the block is the first of its group, also store
// the group's scale.
FB_D void store_scale(const Spec &s, const Request &r, const Block &b, int row, int col) {
  if (s.scaling.kind == NONE) return;
  const int rows = s.source == ON_CHIP ? s.block_rows : r.blocks.rows;
  const int cols = s.source == ON_CHIP ? s.block_cols : r.blocks.cols;
  if (row % rows || col % cols) return;
  const int block_row = row / rows, block_col = col / cols;
  const int64_t at = int64_t(block_row) * r.blocks.across + block_col;
  const uint32_t code = b.poisoned ? s.scaling.nan_code : b.scale.code;
  if (s.operand && s.scaling.kind == FLOAT) {
    const int across = s.down ? block_col : block_row, along = s.down ? block_row : block_col;
    ((uint32_t *)r.scales)[int64_t(across) * r.line_stride + int64_t(along) * r.block_stride] =
        b.poisoned ? code : bits(b.scale.decode);
  } else if (s.operand) {
    // `store_line_scales` has stored the scale
  } else if (s.scaling.kind == FLOAT) {
    ((uint32_t *)r.scales)[at] = code;
  } else {
    ((uint8_t *)r.scales)[at] = uint8_t(code);
  }
  const bool first = s.group ? (s.down ? block_row : block_col) % s.group == 0 : block_row + block_col == 0;
  if (!s.scaling.grouped() || !first) return;
  const int group = group_index(s, block_row, block_col, r.blocks.across);
  const Group shared = make_group(s.scaling, value(s.grid.max), value(r.group_amax[group]));
  r.group_scales[group] = value(stored_group(s.scaling, shared));
}

// The values from which `known` rebuilds the blocks of one slot, accessed by an index that is unknown at compile time.
struct Tops {
  uint32_t of[WIDTH];
  FB_D uint32_t at(const Split &split, int n) const {
    uint32_t top = of[0];
#pragma unroll
    for (int i = 1; i < WIDTH; i++)
      if (split.starts(0, i)) top = n >= i ? of[i] : top;
    return top;
  }
};
FB_D Tops tops_of(const Split &split, const uint32_t (&left)[SLOTS][WIDTH], int k) {
  Tops t{};
#pragma unroll
  for (int j = 0; j < SLOTS; j++)
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (split.starts(j, i)) t.of[i] = k >= j ? left[j][i] : t.of[i];
  return t;
}
template <class D> FB_D Vector<D> picked(const Vector<D> (&x)[SLOTS], int k) {
  Vector<D> v = x[0];
#pragma unroll
  for (int j = 1; j < SLOTS; j++)
#pragma unroll
    for (int i = 0; i < Vector<D>::WORDS; i++) v.w[i] = j == k ? x[j].w[i] : v.w[i];
  return v;
}

}  // namespace fb
