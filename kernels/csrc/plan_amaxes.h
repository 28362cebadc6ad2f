// The first pass of a plan: computes the amaxes of blocks and of groups, and the stored scales of groups.
#pragma once
#include "plan.h"

namespace fb {

// Return the values of a tile, and their stride: values of the matrix, or rotated values in s.rotated. `second`: in a
// later pass, which reads the output if the first pass has written the rotated values there (`staged`).
template <class D> const Cell<D> *Plan<D>::source(const Tile &t, Scratch<D> &s, int64_t *stride, bool second) const {
  const Cell<D> *from = x + t.r0 * cols + t.c0;
  if (!q.hadamard || (staged && second)) {
    *stride = cols;
    return second ? second_source() + t.r0 * cols + t.c0 : from;
  }
  int64_t n = t.c1 - t.c0;
  s.rotated.resize(size_t((t.r1 - t.r0) * n));
  if (q.down) {
    rotation.down(from, cols, t.r1 - t.r0, n, s.rotated.data(), n);
  } else {
    for (int64_t r = 0; r < t.r1 - t.r0; r++) rotation.along(from + r * cols, n, s.rotated.data() + r * n);
  }
  *stride = n;
  return s.rotated.data();
}

// Compute into s.amax the amaxes (float32 bits) of those parts of one row of blocks that lie in columns [c0, c1) and in
// the `height` rows from `from` on.
template <class D>
void Plan<D>::amaxes(const Cell<D> *from, int64_t stride, int64_t height, int64_t c0, int64_t c1, Scratch<D> &s) const {
  int64_t n = c1 - c0, first = c0 / C, count = (c1 - 1) / C - first + 1;
  s.amax.resize(size_t(count));
  s.maxima.resize(size_t(n));
  const Cell<D> *line = from;
  if (height > 1) {
    std::fill(s.maxima.begin(), s.maxima.end(), Cell<D>(0));
    for (int64_t r = 0; r < height; r++) column_maxima<D>(from + r * stride, n, s.maxima.data());
    line = s.maxima.data();
  }
  if (C == 1) {
    for (int64_t b = 0; b < count; b++) s.amax[b] = float_bits<D>(Cell<D>(line[b] & D::magnitude_mask));
  } else if (C % GROUP == 0 && c0 % GROUP == 0) {
    group_maxima<D>(line, n, s.maxima.data());
    int64_t per_block = C / GROUP, groups = (n + GROUP - 1) / GROUP;
    if (c0 % C == 0 && n % C == 0 &&
        !(per_block & (per_block - 1))) {  // take the maximum of pairs until each block has one value
      Cell<D> *m = s.maxima.data();
      for (int64_t left = groups; left > count; left /= 2)
        for (int64_t i = 0; i < left / 2; i++) m[i] = m[2 * i] > m[2 * i + 1] ? m[2 * i] : m[2 * i + 1];
      for (int64_t b = 0; b < count; b++) s.amax[b] = float_bits<D>(m[b]);
      return;
    }
    for (int64_t b = 0; b < count; b++) {
      int64_t g = std::max<int64_t>(0, ((first + b) * C - c0) / GROUP),
              end = std::min(((first + b + 1) * C - c0) / GROUP, groups);
      Cell<D> m = 0;
      for (; g < end; g++) m = std::max(m, s.maxima[g]);
      s.amax[b] = float_bits<D>(m);
    }
  } else {
    for (int64_t b = 0; b < count; b++) {
      int64_t from_col = std::max((first + b) * C, c0) - c0, to_col = std::min((first + b + 1) * C, c1) - c0;
      Cell<D> m = 0;
      for (int64_t c = from_col; c < to_col; c++) m = std::max(m, Cell<D>(line[c] & D::magnitude_mask));
      s.amax[b] = float_bits<D>(m);
    }
  }
}

template <class D> void Plan<D>::first_walk(const Tile &t, Scratch<D> &s) {
  int64_t stride;
  const Cell<D> *from = source(t, s, &stride, false);
  if (staged)
    for (int64_t r = t.r0; r < t.r1; r++)
      put((Cell<D> *)request.out + r * cols + t.c0, from + (r - t.r0) * stride, size_t(t.c1 - t.c0) * sizeof(Cell<D>),
          around);
  for (int64_t r = t.r0; r < t.r1;) {
    int64_t block_row = r / R, end = std::min(t.r1, (block_row + 1) * R);
    const Cell<D> *at = from + (r - t.r0) * stride;
    if (!lookup && in_one_group(t)) {  // if all values are finite, only their maximum is needed
      if (R == 1 && !q.group) end = t.r1;
      Cell<D> m = 0;
      for (int64_t k = 0; k < end - r; k++) {
        Cell<D> row = 0;
        const Cell<D> *line = at + k * stride;
        for (int64_t c = 0; c < t.c1 - t.c0; c++) row = std::max(row, Cell<D>(line[c] & D::magnitude_mask));
        m = std::max(m, row);
      }
      if (m < D::inf) {
        raise_to(&group_amax[size_t(group_of(block_row, t.c0 / C))], float_bits<D>(m));
        r = end;
        continue;
      }
      end = std::min(t.r1, (block_row + 1) * R);
    }
    amaxes(at, stride, end - r, t.c0, t.c1, s);
    int64_t first = t.c0 / C;
    const bool whole = t.c0 % C == 0 && (t.c1 % C == 0 || t.c1 == cols) && r == block_row * R &&
                       end == std::min(rows, (block_row + 1) * R);
    if (lookup && whole) {  // no other tile contains a part of these blocks
      std::copy(s.amax.begin(), s.amax.end(), &block_amax[size_t(block_row * block_count_cols + first)]);
      r = end;
      continue;
    }
    const int64_t count = int64_t(s.amax.size());
    for (int64_t b = 0; lookup && b < count; b++)
      raise_to(&block_amax[size_t(block_row * block_count_cols + first + b)], s.amax[size_t(b)]);
    for (int64_t b = 0, next; !lookup && b < count; b = next) {
      next = !q.group ? count : q.down ? b + 1 : std::min(count, b + q.group - (first + b) % q.group);
      uint32_t m = 0;
      for (int64_t i = b; i < next; i++) m = std::max(m, s.amax[size_t(i)] < INF ? s.amax[size_t(i)] : 0u);
      raise_to(&group_amax[size_t(group_of(block_row, first + b))], m);
    }
    r = end;
  }
}

template <class D> void Plan<D>::after_first_walk() {
  if (lookup && grouped && !q.group) {
    uint32_t m = 0;
    for (uint32_t a : block_amax) m = std::max(m, a < INF ? a : 0u);
    group_amax[0] = m;
  } else if (lookup && grouped) {
    for (int64_t i = 0; i < block_count_rows; i++)
      for (int64_t j = 0; j < block_count_cols; j++) {
        uint32_t a = block_amax[size_t(i * block_count_cols + j)];
        if (a < INF) raise_to(&group_amax[size_t(group_of(i, j))], a);
      }
  }
  if (request.group_scales)
    for (size_t g = 0; g < group_amax.size(); g++)
      request.group_scales[g] = stored_group(q.scaling, make_group(q.scaling, q.grid.max, value(group_amax[g])));
}

// Record the amax of each tally block (a part for which statistics are counted), for the elements in the given rows. If
// the tally blocks are the quantizer's blocks, or there is only one tally block, the amaxes in s.amax are used.
template <class D>
void Plan<D>::note_amax(const Cell<D> *from, int64_t stride, int64_t height, int64_t tally_row, const Tile &t,
                        Scratch<D> &s) const {
  int64_t TC = request.tally_cols, TR = request.tally_rows, across = (cols + TC - 1) / TC;
  uint32_t *row = request.amax + tally_row * across;
  bool skips = request.skip != nullptr;
  if (!skips && ((TC >= cols && TR >= rows) || (TC == C && TR == R))) {
    for (size_t b = 0; b < s.amax.size(); b++) raise_to(row + (t.c0 / C + int64_t(b)) * C / TC, s.amax[b]);
    return;
  }
  for (int64_t b = t.c0 / TC; b * TC < t.c1; b++) {
    if (skips && request.skip[tally_row * across + b]) continue;
    Cell<D> m = 0;
    for (int64_t r = 0; r < height; r++)
      for (int64_t c = std::max(b * TC, t.c0); c < std::min((b + 1) * TC, t.c1); c++)
        m = std::max(m, Cell<D>(from[r * stride + c - t.c0] & D::magnitude_mask));
    raise_to(row + b, float_bits<D>(m));
  }
}

}  // namespace fb
