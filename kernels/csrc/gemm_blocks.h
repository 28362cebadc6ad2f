// Panels and tiles of gemm.h for products of 32 x 32 blocks. P is their implementation: VectorBlocks (blocks.h), or
// TileBlocks (AMX, tile_blocks.h).
#pragma once
#include "blocks.h"
#include "gemm.h"

namespace fb {

template <class P> struct BlockKernel {
  typedef typename P::Element Element;
  typedef typename P::Session Session;
  // A panel of B has 32 KiB: 512 values of k in BF16, or 256 in float32.
  static constexpr int64_t ROWS = BLOCK, COLS = BLOCK, UNIT = BLOCK;
  static constexpr int64_t K_BLOCK = 1024 / int64_t(sizeof(Element)), LARGEST_BLOCK = K_BLOCK;

  static void pack_left(const Operand &x, int64_t outers, int64_t ks, Element *to) {
    const int64_t depth = round_up(ks, UNIT);
    each_square(x, outers, ks, [&](const Operand &at, int64_t o, int64_t k) {
      Element *rows = to + o * depth + k;
      if (x.inner == 1) return gather(at, outers - o, ks - k, rows, depth);
      with_rows(at, outers - o, ks - k, [&](const Element *square, int64_t stride) {
        P::transpose(square, stride, BLOCK, BLOCK, rows, depth);
      });
    });
  }

  static void pack_right(const Operand &x, int64_t outers, int64_t ks, Element *to) {
    const int64_t depth = round_up(ks, UNIT);
    each_square(x, outers, ks, [&](const Operand &at, int64_t o, int64_t k) {
      Element *panel = to + o * depth + k * BLOCK;
      with_rows(at, outers - o, ks - k, [&](const Element *square, int64_t stride) {
        x.inner == 1 ? P::pack_columns(square, stride, BLOCK, panel) : P::pack_rows(square, stride, BLOCK, panel);
      });
    });
  }

  static void tile(const Element *left, const Element *right, int64_t depth, float *c, int64_t stride, int64_t rows,
                   int64_t cols, bool begin) {
    if (rows >= BLOCK && cols >= BLOCK) return add(left, right, depth, c, stride, begin);
    float whole[BLOCK * BLOCK] = {};
    rows = std::min(rows, BLOCK), cols = std::min(cols, BLOCK);
    if (!begin)
      for (int64_t r = 0; r < rows; r++) std::copy_n(c + r * stride, cols, whole + r * BLOCK);
    add(left, right, depth, whole, BLOCK, begin);
    for (int64_t r = 0; r < rows; r++) std::copy_n(whole + r * BLOCK, cols, c + r * stride);
  }

 private:
  static void add(const Element *left, const Element *right, int64_t depth, float *c, int64_t stride, bool begin) {
    begin ? P::template multiply<false>(left, depth, right, depth, c, stride)
          : P::template multiply<true>(left, depth, right, depth, c, stride);
  }

  // Call f with each 32 x 32 square of an operand, in the order of memory: one row of squares after the other.
  template <class F> static void each_square(const Operand &x, int64_t outers, int64_t ks, F f) {
    if (x.inner == 1) {
      for (int64_t o = 0; o < outers; o += BLOCK)
        for (int64_t k = 0; k < ks; k += BLOCK) f(x.from(o, k), o, k);
    } else {
      for (int64_t k = 0; k < ks; k += BLOCK)
        for (int64_t o = 0; o < outers; o += BLOCK) f(x.from(o, k), o, k);
    }
  }

  // Call f with the rows of a square and their stride. If the square is whole, has the type of panels and an even
  // stride (P's functions read pairs of elements), f reads the operand's memory; otherwise f reads a copy.
  template <class F> static void with_rows(const Operand &x, int64_t outers, int64_t ks, F f) {
    const int64_t stride = x.inner == 1 ? x.outer : x.inner;
    if (sizeof(Element) == sizeof(bf16) && outers >= BLOCK && ks >= BLOCK && stride % 2 == 0)
      return f((const Element *)x.data, stride);
    Element square[BLOCK * BLOCK];
    gather(x, outers, ks, square, BLOCK);
    f(square, BLOCK);
  }

  // Copy a square in the order of memory: if x.outer is 1, each row has one k. Elements beyond x become 0.
  static void gather(const Operand &x, int64_t outers, int64_t ks, Element *to, int64_t stride) {
    const bool by_k = x.inner != 1;
    const int64_t rows = std::min(BLOCK, by_k ? ks : outers), columns = std::min(BLOCK, by_k ? outers : ks);
    for (int64_t r = 0; r < BLOCK; r++, to += stride) {
      if (r >= rows || columns < BLOCK) std::fill(to, to + BLOCK, Element(0));
      if (r < rows) copy(x.data + r * (by_k ? x.inner : x.outer), columns, to);
    }
  }
  static void copy(const bf16 *from, int64_t n, bf16 *to) { memcpy(to, from, size_t(n) * sizeof(bf16)); }
  static void copy(const bf16 *from, int64_t n, float *to) {
    each_vector(n, [&](int64_t i, auto lanes) FB_INLINED { store(to + i, load(from + i, lanes)); });
  }
};

}  // namespace fb
