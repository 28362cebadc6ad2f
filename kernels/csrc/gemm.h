// C = A · B of BF16 matrices with FP32 sums: the division into blocks, which all implementations share.
//
// This is Goto's algorithm. Both operands are packed, a part of the summed dimension at a time, into panels of
// Kernel::ROWS rows of A and Kernel::COLS columns of B, where Kernel is the implementation for a kind of processor.
// Each sum adds its products in the order that arithmetic.md ("Products") defines for the kind of processor, however
// the matrices are divided into tiles, blocks and threads, so the bits do not depend on this division. Elements beyond
// the matrices are zeros in panels.
#pragma once
#include <stdint.h>
#include <algorithm>
#include <memory>
#include "parallel.h"

namespace fb {

struct alignas(64) Line {
  char bytes[64];
};

// The operand A as M x K, or B as N x K. `outer` is the stride along M or N, `inner` the stride along K; one of the two
// strides is 1.
struct Operand {
  const uint16_t *data;
  int64_t outer, inner;
  const uint16_t *at(int64_t o, int64_t k) const { return data + o * outer + k * inner; }
  Operand from(int64_t o, int64_t k) const { return Operand{at(o, k), outer, inner}; }
};

// The part of the product that is computed at a time.
struct Part {
  int64_t m, n, k, ms, ns, ks;  // m, n, k: its start; ms, ns, ks: its sizes
};

inline int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }
inline int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

template <class Kernel>
void multiply(const Operand &a, const Operand &b, const Part &at, float *c, int64_t stride,
              typename Kernel::Element *left, typename Kernel::Element *right) {
  const int64_t depth = round_up(at.ks, Kernel::UNIT);
  Kernel::pack_left(a.from(at.m, at.k), at.ms, at.ks, left);
  Kernel::pack_right(b.from(at.n, at.k), at.ns, at.ks, right);
  for (int64_t j = 0; j < at.ns; j += Kernel::COLS)
    for (int64_t i = 0; i < at.ms; i += Kernel::ROWS)
      Kernel::tile(left + i * depth, right + j * depth, depth, c + (at.m + i) * stride + at.n + j, stride, at.ms - i,
                   at.ns - j, at.k == 0);
}

// Return the size of equal parts, rounded up to a multiple of `unit`. The number of parts is `parts`, or a multiple of
// it if the parts would be larger than `largest`.
inline int64_t part(int64_t size, int64_t parts, int64_t unit, int64_t largest) {
  return round_up(ceil_div(size, parts * ceil_div(size, parts * largest)), unit);
}

// Return memory for at least `size` lines (a few MiB at most). The thread keeps the memory for its next product, which
// then does not wait for new pages.
inline Line *room(int64_t size) {
  static thread_local std::unique_ptr<Line[]> lines;
  static thread_local int64_t kept = 0;
  if (kept < size) lines.reset(), lines.reset(new Line[size_t(size)]), kept = size;
  return lines.get();
}

// Threads divide the blocks of C among themselves. Each thread packs its own operands, because packing an operand twice
// costs less than synchronising.
template <class Kernel>
void matmul(const Operand &a, const Operand &b, int64_t M, int64_t N, int64_t K, float *c, int threads) {
  typedef typename Kernel::Element Element;
  // The number of rows and columns that each thread packs if the rows are divided among d threads.
  auto packed = [&](int64_t d) { return M / d + N / (threads / d); };
  int down = 1;
  for (int d = 2; d <= threads; d++)
    if (threads % d == 0 && packed(d) < packed(down)) down = d;
  const int64_t m_block = part(M, down, Kernel::ROWS, Kernel::LARGEST_BLOCK);
  const int64_t n_block = part(N, threads / down, Kernel::COLS, Kernel::LARGEST_BLOCK);
  const int64_t across = ceil_div(N, n_block), deepest = std::min(Kernel::K_BLOCK, round_up(K, Kernel::UNIT));
  auto lines_of = [&](int64_t outers) {
    return ceil_div(outers * deepest * int64_t(sizeof(Element)), int64_t(sizeof(Line)));
  };
  const int64_t left = lines_of(m_block), right = lines_of(n_block);
  in_parallel(ceil_div(M, m_block) * across, threads, [&](int64_t count) {
    typename Kernel::Session session;
    Line *lines = room(left + right);
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < count; i++) {
      int64_t m = i / across * m_block, n = i % across * n_block;
      for (int64_t k = 0; k < K; k += Kernel::K_BLOCK) {
        Part at{m, n, k, std::min(m_block, M - m), std::min(n_block, N - n), std::min(Kernel::K_BLOCK, K - k)};
        multiply<Kernel>(a, b, at, c, N, (Element *)lines, (Element *)(lines + left));
      }
    }
  });
}

}  // namespace fb
