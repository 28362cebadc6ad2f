// The scales of a plan's blocks: computes them for a row of blocks, compares two candidates (Four Over Six), corrects
// them (MS-EDEN), stores them, and expands them to columns.
#pragma once
#include "plan.h"

namespace fb {

// Compare the two candidate scales of each block, for Four Over Six, between the first and the second pass.
template <class D> void Plan<D>::weigh(const Tile &t, Scratch<D> &s) {
  int64_t stride, first = t.c0 / C, count = (t.c1 - 1) / C - first + 1;
  const Cell<D> *from = source(t, s, &stride, true);
  Group group = make_group(q.scaling, q.grid.max, value(group_amax[0]));
  std::vector<FourOverSix> blocks(static_cast<size_t>(count));
  std::vector<int64_t> sums(static_cast<size_t>(count));
  uint16_t high[CHUNK + 2 * PIECE];
  for (int64_t r = t.r0; r < t.r1;) {
    int64_t block_row = r / R, end = std::min(t.r1, (block_row + 1) * R), at = block_row * block_count_cols + first;
    for (int64_t b = 0; b < count; b++) {
      blocks[size_t(b)] = four_over_six(q.scaling, q.grid.max, group, value(block_amax[size_t(at + b)]));
      sums[size_t(b)] = 0;
    }
    for (; r < end; r++) {
      for (int64_t c0 = t.c0; c0 < t.c1; c0 += CHUNK) {
        int64_t c1 = std::min(t.c1, c0 + CHUNK);
        uint64_t index = uint64_t(r * cols + c0), skipped = index % 8;
        if (q.stochastic) fill_high(index - skipped, c1 - c0 + int64_t(skipped), q.seed, high);
        for (int64_t c = c0; c < c1;) {
          size_t b = size_t(c / C - first);
          int64_t stop = std::min((c / C + 1) * C, c1), i = c - c0;
          const Cell<D> *x = from + (r - t.r0) * stride + c - t.c0;
          sums[b] += q.stochastic ? weigh_run<D, true>(x, stop - c, q.grid, blocks[b], high + skipped + i,
                                                       index + uint64_t(i), q.seed)
                                  : weigh_run<D, false>(x, stop - c, q.grid, blocks[b], high, 0, 0);
          c = stop;
        }
      }
    }
    for (int64_t b = 0; b < count; b++)
      __atomic_fetch_add(&four_less_six[size_t(at + b)], sums[size_t(b)], __ATOMIC_RELAXED);
  }
}

// Replace the scales by MS-EDEN's, which correct for the rounding of elements with the former scales. Rotated chunks
// hold whole blocks, and tiles hold whole rotated chunks.
template <class D>
void Plan<D>::correct(const Cell<D> *from, int64_t stride, int64_t height, int64_t block_row, const Tile &t,
                      Scratch<D> &s) const {
  int64_t count = int64_t(s.amax.size());
  s.squares.assign(size_t(count), 0), s.products.assign(size_t(count), 0);
  for (int64_t r = 0; r < height; r++) {
    const Cell<D> *line = from + r * stride;
    if (C == 1) {
      products_each<D>(line, count, q.grid, s.block_encode.data(), s.squares.data(), s.products.data());
      continue;
    }
    for (int64_t b = 0; b < count; b++) {
      int64_t n = std::min((b + 1) * C, t.c1 - t.c0) - b * C;
      Products run = products_run<D>(line + b * C, n, q.grid, s.block_encode[size_t(b)]);
      s.squares[size_t(b)] += run.squares, s.products[size_t(b)] += run.products;
    }
  }
  const Grid stored = q.scaling.stored.grid();
  uint64_t first = uint64_t(block_row * block_count_cols + t.c0 / C);
  for (size_t b = 0; b < size_t(count); b++) {
    if (s.care[b] == POISONED) continue;
    Scale to = corrected(scale_at(s, b), stored, Products{s.squares[b], s.products[b]}, first + b, q.seed);
    s.block_decode[b] = to.decode, s.code[b] = to.code;
    if (!to.code && s.amax[b]) s.care[b] = CAREFUL;  // the block becomes zero
  }
}

// Compute the scales of one row of blocks in a tile, one for each block.
template <class D>
void Plan<D>::find_scales(const Cell<D> *from, int64_t stride, int64_t height, int64_t block_row, const Tile &t,
                          Scratch<D> &s) const {
  int64_t first = t.c0 / C;
  if (lookup) {
    int64_t count = (t.c1 - 1) / C - first + 1;
    const uint32_t *known = &block_amax[size_t(block_row * block_count_cols + first)];
    s.amax.assign(known, known + count);
  } else {
    amaxes(from, stride, height, t.c0, t.c1, s);
  }
  size_t count = s.amax.size();
  s.block_encode.resize(count), s.block_decode.resize(count), s.block_outer.resize(count);
  s.code.resize(count), s.care.resize(count);
  float max = q.grid.max, *encode = s.block_encode.data(), *decode = s.block_decode.data();
  Bounds ordinary = ordinary_bounds<D>(q.scaling, q.grid);
  bool varies = q.group_by_row && q.down;
  for (size_t b = 0; b < count; b += varies ? 1 : count) {
    Group g =
        make_group(q.scaling, max, grouped ? value(group_amax[size_t(group_of(block_row, first + int64_t(b)))]) : 0);
    int64_t m = varies ? 1 : int64_t(count);
    const uint32_t *amax = s.amax.data() + b;
    BlockScales to{encode + b, decode + b, s.code.data() + b, s.care.data() + b};
    switch (q.scaling.kind) {
      case FLOAT:
        scales<FLOAT>(q.scaling, amax, m, max, g, ordinary, to);
        break;
      case MANTISSA:
        scales<MANTISSA>(q.scaling, amax, m, max, g, ordinary, to);
        break;
      case POWER:
        scales<POWER>(q.scaling, amax, m, max, g, ordinary, to);
        break;
      case TWO_LEVEL:
        scales<TWO_LEVEL>(q.scaling, amax, m, max, g, ordinary, to);
        break;
      default:
        scales<NONE>(q.scaling, amax, m, max, g, ordinary, to);
    }
    for (int64_t k = 0; weighs() && k < m; k++)
      if (four_less_six[size_t(block_row * block_count_cols + first + k)] < 0) {
        Scale four = make_scale(q.scaling, max, value(amax[k]), g, value(q.scaling.expansion));
        to.encode[k] = four.encode, to.decode[k] = four.decode, to.code[k] = four.code;
      }
    std::fill(s.block_outer.begin() + int64_t(b), s.block_outer.begin() + int64_t(b) + m,
              q.scaling.two_levels() ? g.decode : 1.0f);
  }
  if (q.scaling.corrects()) correct(from, stride, height, block_row, t, s);
}

template <class D> void Plan<D>::store_scales(int64_t block_row, const Tile &t, const Scratch<D> &s) const {
  const int64_t first = block_row * block_count_cols + t.c0 / C;
  for (size_t b = 0; b < s.code.size(); b++) {
    const uint32_t code = s.care[b] == POISONED ? q.scaling.nan_code : s.code[b];
    if (q.scaling.kind == FLOAT) {
      ((uint32_t *)request.scales)[first + int64_t(b)] = code;
    } else {
      ((uint8_t *)request.scales)[first + int64_t(b)] = uint8_t(code);
    }
  }
}

// Expand the scales of blocks to one for every 16 columns, or one for each column, of [c0, c1).
template <class D> void Plan<D>::spread_out(int64_t c0, int64_t c1, int64_t first, Scratch<D> &s) const {
  s.encode.resize(CHUNK), s.decode.resize(CHUNK);
  const float *__restrict encode = s.block_encode.data(), *__restrict decode = s.block_decode.data();
  float *__restrict to_encode = s.encode.data(), *__restrict to_decode = s.decode.data();
  int64_t step = layout() == BY_SIXTEEN ? GROUP : 1;
  if (C == step) {
    std::copy(encode + (c0 / C - first), encode + ((c1 - 1) / C + 1 - first), to_encode);
    std::copy(decode + (c0 / C - first), decode + ((c1 - 1) / C + 1 - first), to_decode);
  } else {
    for (int64_t b = c0 / C, c = c0, i = 0; c < c1; b++)
      for (int64_t end = std::min((b + 1) * C, c1); c < end; c += step, i++)
        to_encode[i] = encode[b - first], to_decode[i] = decode[b - first];
  }
}

}  // namespace fb
