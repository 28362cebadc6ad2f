// Scalings that choose a block's scale by the error of the rounded elements: Four Over Six compares two scales, MS-EDEN
// corrects the scale.
#pragma once
#include "blocks.cuh"
#include "rotate.cuh"

namespace fb {

// MS-EDEN: correct_blocks replaces the amax of each block by a word from which `known` rebuilds the block; Remade names
// the bits of the word: the code of the first scale (NEAREST), the code of the corrected scale (DRAWN), and two flags.
// Rotated chunks, and so tiles, consist of whole blocks; at most two threads share a block, and they are in one warp.
enum Remade : uint32_t { NEAREST = 0xffu, DRAWN = 0xff00u, PLAIN = 0x10000u, NOT_FINITE = 0x20000u };
template <class D>
FB_D void correct_blocks(const Spec &s, const Request &r, const Tile &t, const Vector<D> (&x)[SLOTS],
                         uint32_t (&amax)[SLOTS][WIDTH]) {
  const Split split(s);
  const Grid g = s.grid.grid();
  const int blocks_across = (t.cols + s.block_cols - 1) / s.block_cols;
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (split.starts(k, i)) {
        const int row = t.row(k), col = t.col(k) + i;
        const uint32_t top = bits(D::widen(typename D::Storage(amax[k][i])));
        const Block b = make_block<D>(s, r, top, row, col);
        Products sums{0, 0};
#pragma unroll
        for (int m = 0; m < SLOTS; m++)
#pragma unroll
          for (int n = 0; n < WIDTH; n++)
            if (split.row(m) == split.row(k) && split.col(n) == split.col(i)) {
              float v = scaled(D::widen(typename D::Storage(x[m].get(n) & D::magnitude_mask)), g, b.scale);
              Products one = products(v, smaller(nearest<false>(v, g), g.max));
              sums.squares += one.squares, sums.products += one.products;
            }
        if (s.block_rows > SLOTS || s.block_cols > WIDTH) {
          int partner = s.block_rows > SLOTS ? shape().lanes : 1;
          sums.squares += __shfl_xor_sync(ALL, sums.squares, partner);
          sums.products += __shfl_xor_sync(ALL, sums.products, partner);
        }
        uint64_t number = uint64_t(int64_t(row / s.block_rows) * blocks_across + col / s.block_cols);
        uint32_t drawn = corrected(b.scale, s.scaling.stored.grid(), sums, number, r.key(s)).code;
        amax[k][i] = b.poisoned ? NOT_FINITE
                                : b.scale.code | drawn << 8 | (b.plain && (drawn || top == 0) ? uint32_t(PLAIN) : 0u);
      }
}

// Four Over Six: sets the bit AT_FOUR in the amax of a block whose largest magnitude is mapped to 4. Threads that share
// a block are in one warp. Every element needs two divisions, so slots are processed in a loop that is not unrolled,
// which keeps the code small.
constexpr uint32_t AT_FOUR = 0x80000000u;
template <class D>
FB_D void choose_fours(const Spec &s, const Request &r, const Tile &t, const Vector<D> (&x)[SLOTS],
                       uint32_t (&amax)[SLOTS][WIDTH]) {
  typedef typename D::Storage S;
  const Split split(s);
  const Grid g = s.grid.grid();
  const uint32_t select = s.scaling.select;
  const Group whole = s.group ? Group{1.0f, 1.0f} : make_group(s.scaling, g.max, value(r.group_amax[0]));
  // Elements beyond the matrix get the last group, so that the index stays within the array; they have no effect.
  auto group_of = [&](int m, int n) {
    const int row = t.row(m) < t.rows ? t.row(m) : t.rows - 1, col = t.col(m) + n < t.cols ? t.col(m) + n : t.cols - 1;
    return s.group ? group_at(s, r, row, col) : whole;
  };
  Weighed weighed[SLOTS][WIDTH] = {};
#pragma unroll 1
  for (int m = 0; m < SLOTS; m++) {
    const Vector<D> v = picked<D>(x, m);
    const Tops tops = tops_of(split, amax, m);
    Words draws{};
    if (s.stochastic) draws = eight_draws(t.index(m), ROUND_HIGH, r.key(s));
    int64_t sums[WIDTH] = {};
    uint32_t ask = 0;
#pragma unroll 1
    for (int n = 0; n < WIDTH; n += 2) {
      uint32_t word = draws.w[0];
#pragma unroll
      for (int i = 1; i < WIDTH / 2; i++) word = n == 2 * i ? draws.w[i] : word;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const FourOverSix b = four_over_six(s.scaling, g.max, group_of(m, n + i), D::widen(S(tops.at(split, n + i))));
        float size = D::widen(S(v.pick(n + i) & D::magnitude_mask));
        uint32_t high = (word >> (16 * i)) & 0xffffu;
        int64_t one = s.stochastic ? four_less_six_at_once<true>(size, g, b, high, &ask)
                                   : four_less_six_at_once<false>(size, g, b, high, &ask);
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
          if (split.starts(0, j)) sums[j] = joined(select, sums[j], split.col(n + i) == j ? one : 0);
      }
    }
    if (ask) {
#pragma unroll
      for (int i = 0; i < WIDTH; i++) sums[i] = 0;
#pragma unroll 1
      for (int n = 0; n < WIDTH; n++) {
        const FourOverSix b = four_over_six(s.scaling, g.max, group_of(m, n), D::widen(S(tops.at(split, n))));
        uint64_t index = t.index(m) + uint64_t(n);
        float size = D::widen(S(v.pick(n) & D::magnitude_mask));
        int64_t one = four_less_six(size, g, b, true, rounding_high(index, r.key(s)), index, r.key(s));
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
          if (split.starts(0, i)) sums[i] = joined(select, sums[i], split.col(n) == i ? one : 0);
      }
    }
#pragma unroll
    for (int k = 0; k < SLOTS; k++)
#pragma unroll
      for (int i = 0; i < WIDTH; i++)
        if (split.starts(k, i)) weighed[k][i].sum = joined(select, weighed[k][i].sum, split.row(m) == k ? sums[i] : 0);
  }
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (split.starts(k, i)) {
#pragma unroll
        for (int d = 1; d < WARP; d *= 2)
          if (d < s.block_cols / WIDTH)
            weighed[k][i].sum = joined(select, weighed[k][i].sum, weighed[k][i].shuffled(d).sum);
#pragma unroll
        for (int d = 1; d < WARP; d *= 2)
          if (d < s.block_rows / SLOTS)
            weighed[k][i].sum = joined(select, weighed[k][i].sum, weighed[k][i].shuffled(d * shape().lanes).sum);
        if (prefers_four(select, weighed[k][i].sum)) amax[k][i] |= AT_FOUR;
      }
}

// Rebuild a block from `left`, the value that the kernel keeps for it: the storage bits of its amax, or, for MS-EDEN
// and Four Over Six, the value that correct_blocks or choose_fours writes.
template <class D> FB_D Block known(const Spec &s, const Request &r, uint32_t left, int row, int col) {
  if (s.scaling.compares())
    return make_block<D>(s, r, bits(D::widen(typename D::Storage(left & ~AT_FOUR))), row, col,
                         left & AT_FOUR ? value(s.scaling.expansion) : 1.0f);
  if (!s.scaling.corrects()) return make_block<D>(s, r, bits(D::widen(typename D::Storage(left))), row, col);
  const Grid stored = s.scaling.stored.grid();
  const Group group = make_group(s.scaling, value(s.grid.max), value(r.group_amax[0]));
  Block b{two_level_scale(magnitude_value<false>(left & NEAREST, stored, false), stored, group), (left & PLAIN) != 0,
          (left & NOT_FINITE) != 0};
  b.scale.code = (left & DRAWN) >> 8;
  b.scale.decode = magnitude_value<false>(b.scale.code, stored, false);
  b.plain = b.plain && counts<D>(s, b.scale.decode, b.scale);  // in a plain block, the scale is 0 only if the amax is 0
  return b;
}

// Four Over Six for blocks larger than a tile: compare the two scales in a separate pass. W: Weighed or WeighedMax.
template <class W, class D>
FB_D void weigh_rotated(const Spec &s, const Request &r, const Tile &t, const Vector<D> (&x)[SLOTS]) {
  const Grid g = s.grid.grid();
  Gathering<W> blocks(s.block_piece, r.blocks, t, r.four_less_six);
#pragma unroll 1
  for (int k = 0; k < SLOTS; k++) {
    Vector<D> v = picked<D>(x, k);
    int valid = t.valid(k);
#pragma unroll 1
    for (int i = 0; i < WIDTH; i++) {
      if (i < valid) {
        float amax = value(r.block_amax[r.blocks.at(t.row(k), t.col(k) + i)]);
        uint64_t index = t.index(k) + uint64_t(i);
        uint32_t high = s.stochastic ? rounding_high(index, r.key(s)) : 0;
        float size = D::widen(typename D::Storage(v.pick(i) & D::magnitude_mask));
        FourOverSix b = four_over_six(s.scaling, g.max, group_at(s, r, t.row(k), t.col(k) + i), amax);
        blocks.sum.take(four_less_six(size, g, b, s.stochastic, high, index, r.key(s)));
      }
      blocks.after_element(k, i);
    }
    blocks.after_vector(k);
  }
  blocks.after_all();
}
template <class D> FB_D void weigh_tile(const Spec &s, const Request &r, const Tile &t, Vector<D> (&x)[SLOTS]) {
  if (!s.scaling.compares() || s.source == ON_CHIP) return;
  rotate<D>(s, r, t, x);
  if (s.scaling.select == Select::MAX) {
    weigh_rotated<WeighedMax, D>(s, r, t, x);
  } else {
    weigh_rotated<Weighed, D>(s, r, t, x);
  }
}

}  // namespace fb
