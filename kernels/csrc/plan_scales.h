// The scales of a plan's blocks: computes the scales of a row of blocks, compares two candidates (Four Over Six),
// corrects the scales (MS-EDEN), stores them, and expands them to columns.
#pragma once
#include "plan.h"

namespace fb {

// Compute into s.sums `four_less_six` of each block in a row of blocks, as far as its elements are in rows [r, end) and
// in the tile's columns. from: row r. amax: the amaxes of the blocks.
template <class D>
void Plan<D>::weigh(const Cell<D> *from, int64_t stride, int64_t r, int64_t end, const uint32_t *amax, const Tile &t,
                    Scratch<D> &s) const {
  const int64_t count = (t.c1 - 1) / C - t.c0 / C + 1;
  const bool by_group = C % GROUP == 0 && t.c0 % C == 0;
  auto weigh_row = by_group       ? q.stochastic ? &Plan::weigh_groups<true> : &Plan::weigh_groups<false>
                   : q.stochastic ? &Plan::weigh_columns<true>
                                  : &Plan::weigh_columns<false>;
  find_groups(r / R, t.c0 / C, count, s);
  s.six.compute(q, amax, count, s.group_encode.data(), s.group_decode.data(), 1.0f);
  s.four.compute(q, amax, count, s.group_encode.data(), s.group_decode.data(), value(q.scaling.expansion));
  s.amaxes.resize(size_t(count)), s.inverses.resize(size_t(count));
  for (size_t b = 0; b < size_t(count); b++) s.amaxes[b] = value(amax[b]), s.inverses[b] = inverse_amax<D>(s.amaxes[b]);
  if (!by_group) {
    const float *known[] = {s.four.encode.data(), s.four.decode.data(), s.six.encode.data(),  s.six.decode.data(),
                            s.amaxes.data(),      s.inverses.data(),    s.group_decode.data()};
    for (int k = 0; k < 7; k++)
      s.columns[k].resize(size_t(t.c1 - t.c0)), spread(known[k], t.c0, t.c1, s.columns[k].data());
  }
  s.sums.assign(size_t(count), 0);
  for (; r < end; r++, from += stride) (this->*weigh_row)(from, r, t, s);
}

// Add `four_less_six` of a tile's elements to the sums of their blocks, in an additional pass for blocks that are
// larger than a tile.
template <class D> void Plan<D>::weigh_parts(const Tile &t, Scratch<D> &s) {
  int64_t stride;
  const Cell<D> *from = source(t, s, &stride, true);
  for (int64_t r = t.r0, end; r < t.r1; r = end) {
    const int64_t block_row = r / R, at = block_row * block_count_cols + t.c0 / C;
    end = std::min(t.r1, (block_row + 1) * R);
    weigh(from + (r - t.r0) * stride, stride, r, end, &block_amax[size_t(at)], t, s);
    for (size_t b = 0; b < s.sums.size(); b++) {
      int64_t *to = &four_less_six[size_t(at) + b], seen = __atomic_load_n(to, __ATOMIC_RELAXED);
      while (!__atomic_compare_exchange_n(to, &seen, joined(q.scaling.select, seen, s.sums[b]), true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED)) {
      }
    }
  }
}

// Add `four_less_six` of the elements of one row of a tile to the sums of their blocks. Blocks consist of whole groups
// of columns, and the tile starts with a block.
template <class D>
template <bool STOCHASTIC>
void Plan<D>::weigh_groups(const Cell<D> *x, int64_t r, const Tile &t, Scratch<D> &s) const {
  uint16_t high[STOCHASTIC ? CHUNK + 2 * PIECE : 1];
  const int64_t width = t.c1 - t.c0, groups = C / GROUP;
  const uint32_t select = q.scaling.select;
  for (int64_t c = 0, b = 0, done = 0; c < width; c += CHUNK) {  // done: the groups of block b that are processed
    const int64_t end = std::min(width, c + CHUNK);
    const uint64_t index = uint64_t(r * cols + t.c0 + c), skipped = index % 8;
    if (STOCHASTIC) fill_high(index - skipped, end - c + int64_t(skipped), q.seed, high);
    const uint16_t *draws = high + (STOCHASTIC ? int64_t(skipped) : 0);
    auto block = [&](int64_t i) FB_INLINED {
      const float outer = s.group_decode[size_t(i)];
      return FourOverSix{Scale{s.six.encode[size_t(i)], s.six.decode[size_t(i)], outer, 0},
                         Scale{s.four.encode[size_t(i)], s.four.decode[size_t(i)], outer, 0}, s.amaxes[size_t(i)],
                         select};
    };
    // The first loop has no calls, because g++ would load its constants again after each call.
    int64_t totals[CHUNK / GROUP], owners[CHUNK / GROUP];
    uint32_t ask[CHUNK / GROUP];
    const int64_t count = (end - c) / GROUP;
    for (int64_t k = 0; k < count; k++) {
      const int64_t at = k * GROUP;
      totals[k] = weigh_group<D, STOCHASTIC>(x + c + at, q.grid, block(b), s.inverses[size_t(b)],
                                             draws + at * STOCHASTIC, &ask[k]);
      owners[k] = b;
      if (++done == groups) done = 0, b++;
    }
    int64_t *sums = s.sums.data();
    auto weigh = [&](int64_t i, int64_t n, int64_t at) {
      return weigh_each<D, STOCHASTIC>(x + c + at, n, q.grid, block(i), draws + at * STOCHASTIC, index + uint64_t(at),
                                       q.seed);
    };
    for (int64_t k = 0; k < count; k++) {
      int64_t &sum = sums[owners[k]];
      sum = joined(select, sum, ask[k] ? weigh(owners[k], GROUP, k * GROUP) : totals[k]);
    }
    if ((end - c) % GROUP) sums[b] = joined(select, sums[b], weigh(b, (end - c) % GROUP, count * GROUP));
  }
}

// Do what `weigh_groups` does, for blocks of any width, with scales that were expanded to columns (s.columns).
template <class D>
template <bool STOCHASTIC>
void Plan<D>::weigh_columns(const Cell<D> *x, int64_t r, const Tile &t, Scratch<D> &s) const {
  uint16_t high[3 * PIECE];  // fill_high may write up to PIECE values more than requested
  const int64_t width = t.c1 - t.c0;
  s.weights.resize(size_t(width));
  for (int64_t i = 0; i < width; i += PIECE) {
    const int64_t n = std::min(int64_t(PIECE), width - i);
    const uint64_t index = uint64_t(r * cols + t.c0 + i), skipped = STOCHASTIC ? index % 8 : 0;
    const Candidates columns{s.columns[0].data() + i, s.columns[1].data() + i, s.columns[2].data() + i,
                             s.columns[3].data() + i, s.columns[4].data() + i, s.columns[5].data() + i,
                             s.columns[6].data() + i, q.scaling.select};
    if (STOCHASTIC) fill_high(index - skipped, n + int64_t(skipped), q.seed, high);
    weigh_piece<D, STOCHASTIC>(x + i, n, q.grid, columns, high + skipped, index, q.seed, s.weights.data() + i);
  }
  add_blocks(s.weights.data(), t.c0, t.c1, s.sums.data());
}

// Call f with the first column and the number of columns of each block in [c0, c1).
template <class F> FB_INLINE void each_block(int64_t c0, int64_t c1, int64_t C, F f) {
  int64_t end = (c0 / C + 1) * C;
  for (int64_t c = c0; c < c1; c = end, end += C) f(c - c0, std::min(end, c1) - c);
}

// Write the value of each block to its columns in [c0, c1).
template <class D> void Plan<D>::spread(const float *blocks, int64_t c0, int64_t c1, float *to) const {
  if (C == 1) {
    std::copy_n(blocks, c1 - c0, to);
    return;
  }
  each_block(c0, c1, C, [&](int64_t first, int64_t n) FB_INLINED { std::fill_n(to + first, n, *blocks++); });
}

// Join the values of the columns [c0, c1) to the sums of their blocks.
template <class D> void Plan<D>::add_blocks(const int64_t *from, int64_t c0, int64_t c1, int64_t *sums) const {
  if (q.scaling.select == Select::MAX) {
    each_block(c0, c1, C, [&](int64_t first, int64_t n) FB_INLINED {
      for (int64_t i = 0; i < n; i++) *sums = joined(Select::MAX, *sums, from[first + i]);
      sums++;
    });
    return;
  }
  if (C == 1) {
    for (int64_t c = 0; c < c1 - c0; c++) sums[c] += from[c];
    return;
  }
  each_block(c0, c1, C, [&](int64_t first, int64_t n) FB_INLINED {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += from[first + i];
    *sums++ += sum;
  });
}

// Replace the scales by MS-EDEN's corrected scales, which compensate the rounding errors of elements with the first
// scales. Rotated chunks consist of whole blocks, and tiles consist of whole rotated chunks.
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

// Compute the second-level values of a row of `count` blocks, from block `first` on.
template <class D> void Plan<D>::find_groups(int64_t block_row, int64_t first, int64_t count, Scratch<D> &s) const {
  s.group_encode.resize(size_t(count)), s.group_decode.resize(size_t(count));
  float *__restrict encode = s.group_encode.data(), *__restrict decode = s.group_decode.data();
  const uint32_t *__restrict amax = &group_amax[size_t(group_of(block_row, first))];
  const Scaling scaling = q.scaling;
  const float max = q.grid.max;
  if (groups_by_column()) {
    for (int64_t b = 0; b < count; b++) {
      const Group g = make_group(scaling, max, value(amax[b]));
      encode[b] = g.encode, decode[b] = g.decode;
    }
    return;
  }
  for (int64_t b = 0, next; b < count; b = next) {
    next = q.group ? std::min(count, b + q.group - (first + b) % q.group) : count;
    const Group g = make_group(scaling, max, value(*amax++));
    std::fill(encode + b, encode + next, g.encode), std::fill(decode + b, decode + next, g.decode);
  }
}

// Compute the scales of n blocks. less: for Four Over Six, below 0 if a block's amax is mapped to 4. group: a function
// that returns the second-level value of block i.
template <class D>
template <class GroupOf>
void Plan<D>::find_scales_of(const uint32_t *amax, int64_t n, const int64_t *less, const Bounds &ordinary,
                             const BlockScales &to, GroupOf group) const {
  const float max = q.grid.max, four = value(q.scaling.expansion);
  const auto one = [](int64_t) { return 1.0f; };
  switch (q.scaling.kind) {
    case FLOAT:
      return scales<FLOAT, false>(q.scaling, amax, n, max, group, ordinary, to, one);
    case MANTISSA:
      return scales<MANTISSA, false>(q.scaling, amax, n, max, group, ordinary, to, one);
    case POWER:
      return scales<POWER, false>(q.scaling, amax, n, max, group, ordinary, to, one);
    case TWO_LEVEL:
      if (weighs()) {
        const auto chosen = [=](int64_t i) { return less[i] < 0 ? four : 1.0f; };
        return q.scaling.select ? scales<TWO_LEVEL, true>(q.scaling, amax, n, max, group, ordinary, to, chosen)
                                : scales<TWO_LEVEL, false>(q.scaling, amax, n, max, group, ordinary, to, chosen);
      }
      return scales<TWO_LEVEL, false>(q.scaling, amax, n, max, group, ordinary, to, one);
    default:
      return scales<NONE, false>(q.scaling, amax, n, max, group, ordinary, to, one);
  }
}

// Compute the scales of one row of blocks in a tile into s.block_encode, s.block_decode, s.block_outer, s.code and
// s.care.
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
  const BlockScales to{encode, decode, s.code.data(), s.care.data()};
  const int64_t *less = s.sums.data();
  if (weighs()) {
    const uint32_t select = q.scaling.select;
    if (apart) {
      less = &four_less_six[size_t(block_row * block_count_cols + first)];
    } else {
      weigh(from, stride, block_row * R, block_row * R + height, s.amax.data(), t, s), less = s.sums.data();
    }
    if (select == Select::MAX) {
      if (apart) s.sums.assign(less, less + count), less = s.sums.data();
      for (int64_t &sum : s.sums) sum = prefers_four(select, sum) ? -1 : 0;
    }
  }
  float *outer = s.block_outer.data();
  if (q.group) {  // each block has the second-level value of its own group
    find_groups(block_row, first, int64_t(count), s);
    const float *group_encode = s.group_encode.data(), *group_decode = s.group_decode.data();
    find_scales_of(s.amax.data(), int64_t(count), less, ordinary, to,
                   [=](int64_t i) { return Group{group_encode[i], group_decode[i]}; });
    std::copy_n(group_decode, count, outer);
  } else {
    const Group g = make_group(q.scaling, max, grouped ? value(group_amax[0]) : 0.0f);
    find_scales_of(s.amax.data(), int64_t(count), less, ordinary, to, [=](int64_t) { return g; });
    std::fill_n(outer, count, q.scaling.two_levels() ? g.decode : 1.0f / value(q.scaling.factor));
  }
  if (q.scaling.corrects()) correct(from, stride, height, block_row, t, s);
}

template <class D> void Plan<D>::store_scales(int64_t block_row, const Tile &t, const Scratch<D> &s) const {
  for (size_t b = 0; b < s.code.size(); b++) {
    const int64_t block_col = t.c0 / C + int64_t(b), at = block_row * block_count_cols + block_col;
    const bool poisoned = s.care[b] == POISONED;
    const uint32_t code = poisoned ? q.scaling.nan_code : s.code[b];
    if (request.operand) {
      store_operand_scale(block_row, block_col, code, poisoned ? code : bits(s.block_decode[b]));
    } else if (q.scaling.kind == FLOAT) {
      ((uint32_t *)request.scales)[at] = code;
    } else {
      ((uint8_t *)request.scales)[at] = uint8_t(code);
    }
  }
}

// Store the scale of a block of an operand: `decode` if it is FP32, otherwise `code`, for each line of the block.
template <class D>
void Plan<D>::store_operand_scale(int64_t block_row, int64_t block_col, uint32_t code, uint32_t decode) const {
  const int64_t across = q.down ? block_col : block_row, along = q.down ? block_row : block_col;
  const int64_t tall = q.down ? C : R, lines = q.down ? cols : rows;
  if (q.scaling.kind == FLOAT) {
    ((uint32_t *)request.scales)[across * request.line_stride + along * request.block_stride] = decode;
    return;
  }
  for (int64_t line = across * tall; line < std::min(lines, (across + 1) * tall); line++)
    ((uint8_t *)request.scales)[swizzled(line, along, request.block_stride)] = uint8_t(code);
}

// Expand the scales of blocks to one scale for every 16 columns, or for each column, of [c0, c1). first: the block of
// the first scale.
template <class D> void Plan<D>::spread_out(int64_t c0, int64_t c1, int64_t first, Scratch<D> &s) const {
  s.encode.resize(CHUNK), s.decode.resize(CHUNK), s.outer.resize(CHUNK);
  const float *__restrict encode = s.block_encode.data(), *__restrict decode = s.block_decode.data();
  float *__restrict to_encode = s.encode.data(), *__restrict to_decode = s.decode.data();
  if (layout() == EACH_COLUMN) spread(&s.block_outer[size_t(c0 / C - first)], c0, c1, s.outer.data());
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
