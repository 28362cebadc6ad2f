// The part of one quantizer in a pass over a matrix: where its amaxes come from, and how it processes a tile.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>
#include "block_scales.h"
#include "codes.h"
#include "request.h"
#include "rotation.h"

namespace fb {

struct Tile {
  int64_t r0, r1, c0, c1;
};

template <class D> struct Scratch {  // one per thread
  std::vector<Cell<D>> rotated, maxima;
  std::vector<uint32_t> amax, code, kind, squares, products;
  std::vector<float> block_encode, block_decode, block_outer, encode, decode;
};

template <class D> struct Plan {
  const Request &request;
  const Quant &q;
  const Cell<D> *x;
  int64_t rows, cols, R, C, block_count_rows, block_count_cols;
  bool lookup = false;  // blocks are larger than tiles: a first pass computes their amaxes
  bool grouped;         // blocks share a scale: a first pass computes their group's amax
  bool around;          // the output bypasses the caches
  bool staged;          // the first pass leaves the rotated matrix in the output, and the second works on that
  std::vector<uint32_t> block_amax, group_amax;
  std::vector<int64_t> four_less_six;  // fouroversix: one per block
  Rotation<D> rotation;

  Plan(const Request &r, const Cell<D> *x, int64_t rows, int64_t cols)
      : request(r),
        q(r.quant),
        x(x),
        rows(rows),
        cols(cols),
        R(q.scaling == NONE ? 1 : q.block_rows),
        C(q.scaling == NONE ? PIECE : q.block_cols),
        block_count_rows((rows + R - 1) / R),
        block_count_cols((cols + C - 1) / C),
        grouped(is_grouped(q.scaling)),
        rotation(q.hadamard, q.signs) {
    around = double(rows) * double(cols) * sizeof(Cell<D>) > double(16 << 20);
  }
  bool needs_first_walk() const { return lookup || grouped; }
  bool weighs() const { return q.scaling == FOUROVERSIX; }
  void settle() { staged = q.hadamard && needs_first_walk() && request.out && !request.skip; }
  int64_t group_count() const { return !q.group_by_row ? 1 : q.down ? block_count_cols : block_count_rows; }
  int64_t group_of(int64_t block_row, int64_t block_col) const {
    return !q.group_by_row ? 0 : q.down ? block_col : block_row;
  }
  void allocate() {
    if (lookup) block_amax.assign(size_t(block_count_rows * block_count_cols), 0);
    if (grouped) group_amax.assign(size_t(group_count()), 0);
    if (weighs()) four_less_six.assign(size_t(block_count_rows * block_count_cols), 0);
  }

  // The tile's values: the matrix itself, or its rotation.
  const Cell<D> *second_source() const { return staged ? (const Cell<D> *)request.out : x; }
  const Cell<D> *source(const Tile &t, Scratch<D> &s, int64_t *stride, bool second) const {
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

  // Compute the amaxes (float32 bits) of the parts of one row of blocks that lie in columns [c0, c1) and the given
  // rows.
  void amaxes(const Cell<D> *from, int64_t stride, int64_t height, int64_t c0, int64_t c1, Scratch<D> &s) const {
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
      if (c0 % C == 0 && n % C == 0 && !(per_block & (per_block - 1))) {  // halve until each block has one
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

  void first_walk(const Tile &t, Scratch<D> &s) {
    int64_t stride;
    const Cell<D> *from = source(t, s, &stride, false);
    if (staged)
      for (int64_t r = t.r0; r < t.r1; r++)
        put((Cell<D> *)request.out + r * cols + t.c0, from + (r - t.r0) * stride, size_t(t.c1 - t.c0) * sizeof(Cell<D>),
            around);
    for (int64_t r = t.r0; r < t.r1;) {
      int64_t block_row = r / R, end = std::min(t.r1, (block_row + 1) * R);
      const Cell<D> *at = from + (r - t.r0) * stride;
      if (!lookup && !q.group_by_row) {  // one group of whole blocks: if all is finite, they need no distinction
        if (R == 1) end = t.r1;
        Cell<D> m = 0;
        for (int64_t k = 0; k < end - r; k++) {
          Cell<D> row = 0;
          const Cell<D> *line = at + k * stride;
          for (int64_t c = 0; c < t.c1 - t.c0; c++) row = std::max(row, Cell<D>(line[c] & D::magnitude_mask));
          m = std::max(m, row);
        }
        if (m < D::inf) {
          raise_to(&group_amax[0], float_bits<D>(m));
          r = end;
          continue;
        }
        end = std::min(t.r1, (block_row + 1) * R);
      }
      amaxes(at, stride, end - r, t.c0, t.c1, s);
      int64_t first = t.c0 / C;
      for (size_t b = 0; b < s.amax.size(); b++) {
        if (lookup) {
          raise_to(&block_amax[size_t(block_row * block_count_cols + first + int64_t(b))], s.amax[b]);
        } else if (s.amax[b] < INF) {
          raise_to(&group_amax[size_t(group_of(block_row, first + int64_t(b)))], s.amax[b]);
        }
      }
      r = end;
    }
  }
  void after_first_walk() {
    if (lookup && grouped)
      for (int64_t i = 0; i < block_count_rows; i++)
        for (int64_t j = 0; j < block_count_cols; j++) {
          uint32_t a = block_amax[size_t(i * block_count_cols + j)];
          if (a < INF) raise_to(&group_amax[size_t(group_of(i, j))], a);
        }
    if (request.group_scales)
      for (size_t g = 0; g < group_amax.size(); g++) {
        Group group = make_group(q.scaling, q.grid.max, value(group_amax[g]));
        request.group_scales[g] = q.scaling == GAM ? mantissa(group.encode) | 0x3f800000u : bits(group.decode);
      }
  }

  // Between the passes, Four Over Six compares its two scales for each block.
  void weigh(const Tile &t, Scratch<D> &s) {
    int64_t stride, first = t.c0 / C, count = (t.c1 - 1) / C - first + 1;
    const Cell<D> *from = source(t, s, &stride, true);
    Group group = make_group(q.scaling, q.grid.max, value(group_amax[0]));
    std::vector<FourOverSix> blocks(static_cast<size_t>(count));
    std::vector<int64_t> sums(static_cast<size_t>(count));
    uint16_t high[CHUNK + 2 * PIECE];
    for (int64_t r = t.r0; r < t.r1;) {
      int64_t block_row = r / R, end = std::min(t.r1, (block_row + 1) * R), at = block_row * block_count_cols + first;
      for (int64_t b = 0; b < count; b++) {
        float amax = value(block_amax[size_t(at + b)]);
        blocks[size_t(b)] = FourOverSix{make_scale(q.scaling, q.grid.max, amax, group),
                                        make_scale(q.scaling, q.grid.max, amax, group, FOUR), amax};
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

  // Bounds of amaxes whose blocks `piece` can process: nothing overflows, and no result but zero is below normal
  // float32.
  Bounds ordinary_bounds() const {
    bool exact_only = q.grid.overflow != q.grid.max || (q.grid.wide && q.scaling != NONE);
    float smallest = value(q.grid.min_exponent) * power_of_two(int(q.grid.dropped) - 23), max = q.grid.max;
    float most = q.scaling != NONE ? D::max / 4 : std::min(D::max / 4, q.grid.wide ? max / 2 : 2 * max);
    float least = q.scaling == NONE ? 0.0f : FLOAT_MIN_NORMAL * 4 * (max / smallest);
    return Bounds{least, exact_only ? -1.0f : most};
  }

  // Compute the scales of one row of blocks between columns c0 and c1, for each block and then for each column.
  void find_scales(const Cell<D> *from, int64_t stride, int64_t height, int64_t block_row, const Tile &t,
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
    s.code.resize(count), s.kind.resize(count);
    float max = q.grid.max, *encode = s.block_encode.data(), *decode = s.block_decode.data();
    Bounds ordinary = ordinary_bounds();
    bool varies = q.group_by_row && q.down;
    for (size_t b = 0; b < count; b += varies ? 1 : count) {
      Group g =
          make_group(q.scaling, max, grouped ? value(group_amax[size_t(group_of(block_row, first + int64_t(b)))]) : 0);
      int64_t m = varies ? 1 : int64_t(count);
      const uint32_t *amax = s.amax.data() + b;
      BlockScales to{encode + b, decode + b, s.code.data() + b, s.kind.data() + b};
      switch (q.scaling) {
        case AMAX:
          scales<AMAX>(amax, m, max, g, ordinary, to);
          break;
        case GAM:
          scales<GAM>(amax, m, max, g, ordinary, to);
          break;
        case E8M0:
          scales<E8M0>(amax, m, max, g, ordinary, to);
          break;
        case MX:
          scales<MX>(amax, m, max, g, ordinary, to);
          break;
        case NVFP4:
          scales<NVFP4>(amax, m, max, g, ordinary, to);
          break;
        case UE5M3:
          scales<UE5M3>(amax, m, max, g, ordinary, to);
          break;
        case FOUROVERSIX:
          scales<FOUROVERSIX>(amax, m, max, g, ordinary, to);
          for (int64_t k = 0; k < m; k++)
            if (four_less_six[size_t(block_row * block_count_cols + first + k)] < 0) {
              Scale four = make_scale(FOUROVERSIX, max, value(amax[k]), g, FOUR);
              to.encode[k] = four.encode, to.decode[k] = four.decode, to.code[k] = four.code;
            }
          break;
        case EDEN:
          scales<EDEN>(amax, m, max, g, ordinary, to);
          break;
        default:
          scales<NONE>(amax, m, max, g, ordinary, to);
      }
      std::fill(s.block_outer.begin() + int64_t(b), s.block_outer.begin() + int64_t(b) + m,
                two_levels(q.scaling) ? g.decode : 1.0f);
    }
    if (q.scaling == EDEN) correct(from, stride, height, block_row, t, s);
  }

  // Compute MS-EDEN's scales, which correct the rounding by the scales found before. Rotations hold whole blocks, and
  // tiles hold whole rotations.
  void correct(const Cell<D> *from, int64_t stride, int64_t height, int64_t block_row, const Tile &t,
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
    uint64_t first = uint64_t(block_row * block_count_cols + t.c0 / C);
    for (size_t b = 0; b < size_t(count); b++) {
      if (s.kind[b] == POISONED) continue;
      Scale to = corrected(scale_at(s, b), Products{s.squares[b], s.products[b]}, first + b, q.seed);
      s.block_decode[b] = to.decode, s.code[b] = to.code;
      if (!to.code && s.amax[b]) s.kind[b] = CAREFUL;  // the block becomes zero
    }
  }

  Layout layout() const {
    bool whole_groups =
        C % GROUP == 0 && (!request.tally_cols || request.tally_cols >= cols || request.tally_cols % GROUP == 0);
    return C >= PIECE ? UNIFORM : whole_groups ? BY_SIXTEEN : BY_COLUMN;
  }
  // Expand one scale per block to one for every 16 columns, or one for each, of [c0, c1).
  void spread_out(int64_t c0, int64_t c1, int64_t first, Scratch<D> &s) const {
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

  Scale scale_at(const Scratch<D> &s, size_t b) const {
    return Scale{s.block_encode[b], s.block_decode[b], s.block_outer[b], s.code[b]};
  }

  // Process n columns from c of one row, element by element.
  void carefully(const Cell<D> *from, int64_t r, int64_t c, int n, int64_t first_block, const Scratch<D> &s,
                 Cell<D> *to, uint16_t *codes, Tally *tally) const {
    for (int i = 0; i < n; i++) {
      size_t b = size_t((c + i) / C - first_block);
      float was = D::widen(from[i]);
      uint64_t index = uint64_t(r * cols + c + i);
      Element e{value(NAN_BITS), value(NAN_BITS), false};
      if (s.kind[b] != POISONED) e = element<D>(was, q.grid, scale_at(s, b), q.scaling, q.stochastic, index, q.seed);
      to[i] = D::narrow(e.y);
      if (codes) {
        uint32_t code = finite(e.q)                   ? magnitude_code(e.q, q.grid)
                        : s.kind[b] == POISONED       ? 0
                        : bits(magnitude(e.q)) == INF ? request.inf_code
                                                      : request.nan_code;
        uint32_t sign = e.q == e.q ? bits(e.q) >> 31 : 0;  // NaN has no sign
        codes[i] = uint16_t(code | sign << (request.code_bits - 1));
      }
      if (tally) {
        float back = D::widen(to[i]);
        bool capped;
        uint32_t units = error_units(was, back, &capped);
        bool some = was != 0.0f;
        tally->error += some ? units : 0;
        tally->nonzero += some;
        tally->flushed += some && back == 0.0f;
        tally->saturated += e.saturated && back != 0.0f;
        tally->capped += capped;
        tally->nonfinite += !finite(was);
        tally->lost += !finite(back);
      }
    }
  }

  // Process columns [c0, c1) of one row; `from` is the start of the tile's row.
  template <bool DIVIDE, bool STOCHASTIC, bool STATS, Layout LAYOUT, bool WIDE>
  void row(const Cell<D> *from, int64_t r, int64_t c0, int64_t c1, const Tile &t, const Scratch<D> &s, bool all_plain,
           const Cell<D> *fetch, Tally *tallies) const {
    int64_t TC = request.tally_cols ? request.tally_cols : cols, TR = request.tally_rows ? request.tally_rows : rows;
    int64_t tally_count_cols = (cols + TC - 1) / TC, first_block = t.c0 / C;
    Cell<D> *out = (Cell<D> *)request.out;
    uint16_t high[STOCHASTIC ? CHUNK + 2 * PIECE : 1];
    int64_t drawn_from = 0, drawn_to = c0;  // the columns whose bits are at high[0] …
    for (int64_t c = c0; c < c1;) {
      int64_t tally_col = c / TC, block = c / C;
      int64_t stop = std::min(std::min(c + PIECE, c1), (tally_col + 1) * TC);
      if (LAYOUT == UNIFORM) stop = std::min(stop, (block + 1) * C);
      int n = int(stop - c);
      if (request.skip && request.skip[r / TR * tally_count_cols + tally_col]) {
        c = stop;
        continue;
      }
      alignas(64) Cell<D> piece_out[PIECE];
      const Cell<D> *in = from + (c - t.c0);
      if (fetch)
        for (int i = 0; i < n; i += int(64 / sizeof(Cell<D>))) __builtin_prefetch(fetch + (c - t.c0) + i, 0, 2);
      Tally *tally = STATS ? tallies + (tally_col - t.c0 / TC) : nullptr;
      bool plain = all_plain;
      if (!plain) {
        plain = true;
        for (int64_t b = block; b <= (stop - 1) / C; b++) plain = plain && s.kind[size_t(b - first_block)] == ORDINARY;
      }
      if (STOCHASTIC && stop > drawn_to) {
        uint64_t index = uint64_t(r * cols + c), skipped = index % 8;
        drawn_to = std::min(c1, c + CHUNK);
        drawn_from = c - int64_t(skipped);
        fill_high(index - skipped, drawn_to - drawn_from, q.seed, high);
      }
      if (plain) {
        size_t b = size_t(block - first_block);
        int64_t at = LAYOUT == BY_SIXTEEN ? (c - c0) / GROUP : c - c0;
        const float *encode = LAYOUT == UNIFORM ? &s.block_encode[b] : &s.encode[size_t(at)];
        const float *decode = LAYOUT == UNIFORM ? &s.block_decode[b] : &s.decode[size_t(at)];
        Counts k = piece<D, DIVIDE, STOCHASTIC, STATS, LAYOUT, WIDE>(
            in, piece_out, n, encode, decode, s.block_outer[b], q.grid, STOCHASTIC ? high + (c - drawn_from) : nullptr);
        if (k.again) {
          plain = false;
        } else if (STATS) {
          tally->error += k.error;
          tally->nonzero += k.nonzero;
          tally->flushed += k.zeros - (uint32_t(n) - k.nonzero);
          tally->saturated += k.saturated;
          tally->capped += k.capped;
        }
      }
      if (!plain) carefully(in, r, c, n, first_block, s, piece_out, nullptr, tally);
      if (out) put(out + r * cols + c, piece_out, size_t(n) * sizeof(Cell<D>), around);
      c = stop;
    }
  }

  // Record the amax of each tally block's part in the given rows; if the partitions agree, it is that of the block.
  void note_amax(const Cell<D> *from, int64_t stride, int64_t height, int64_t tally_row, const Tile &t,
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

  // The line to prefetch while row r is processed: of the next row of blocks, here or in this thread's next tile; null
  // if there is none.
  const Cell<D> *fetch_for(int64_t r, const Tile &t, const Tile &next) const {
    int64_t target = q.hadamard && !staged ? t.r1 + (r - t.r0) : r + (lookup ? 2 : R);
    if (target < t.r1) return second_source() + target * cols + t.c0;
    target = next.r0 + (target - t.r1);
    return target < next.r1 ? second_source() + target * cols + next.c0 : nullptr;
  }

  typedef void (Plan::*Row)(const Cell<D> *, int64_t, int64_t, int64_t, const Tile &, const Scratch<D> &, bool,
                            const Cell<D> *, Tally *) const;
  template <bool DIVIDE, bool STOCHASTIC, bool STATS> Row row_for() const {
    if (q.grid.wide) return &Plan::row<false, STOCHASTIC, STATS, UNIFORM, true>;
    switch (layout()) {
      case UNIFORM:
        return &Plan::row<DIVIDE, STOCHASTIC, STATS, UNIFORM, false>;
      case BY_SIXTEEN:
        return &Plan::row<DIVIDE, STOCHASTIC, STATS, BY_SIXTEEN, false>;
      default:
        return &Plan::row<DIVIDE, STOCHASTIC, STATS, BY_COLUMN, false>;
    }
  }
  template <bool DIVIDE> Row row_for() const {
    if (q.stochastic) return request.tally ? row_for<DIVIDE, true, true>() : row_for<DIVIDE, true, false>();
    return request.tally ? row_for<DIVIDE, false, true>() : row_for<DIVIDE, false, false>();
  }
  Row chosen_row() const { return q.scaling == AMAX || q.scaling == GAM ? row_for<true>() : row_for<false>(); }

  // Compute packed codes of columns [c0, c1) of one row, in place of `row`; c0 is a multiple of 8, and so starts a
  // byte.
  template <bool STOCHASTIC, Layout LAYOUT, bool WIDE>
  void code_row(const Cell<D> *from, int64_t r, int64_t c0, int64_t c1, const Tile &t, const Scratch<D> &s,
                bool all_plain, const Cell<D> *fetch) const {
    const int64_t first_block = t.c0 / C;
    uint16_t high[STOCHASTIC ? CHUNK + 2 * PIECE : 1], codes[CHUNK];
    Cell<D> ignored[PIECE];
    const uint64_t index = uint64_t(r * cols + c0), skipped = index % 8;
    if (STOCHASTIC) fill_high(index - skipped, c1 - c0 + int64_t(skipped), q.seed, high);
    for (int64_t c = c0; c < c1;) {
      int64_t block = c / C, stop = std::min(c + PIECE, c1);
      if (LAYOUT == UNIFORM) stop = std::min(stop, (block + 1) * C);
      int n = int(stop - c);
      const Cell<D> *in = from + (c - t.c0);
      if (fetch)
        for (int i = 0; i < n; i += int(64 / sizeof(Cell<D>))) __builtin_prefetch(fetch + (c - t.c0) + i, 0, 2);
      bool plain = true;
      for (int64_t b = block; !all_plain && b <= (stop - 1) / C; b++)
        plain = plain && s.kind[size_t(b - first_block)] == ORDINARY;
      if (plain) {
        int64_t at = LAYOUT == BY_SIXTEEN ? (c - c0) / GROUP : c - c0;
        const float *encode = LAYOUT == UNIFORM ? &s.block_encode[size_t(block - first_block)] : &s.encode[size_t(at)];
        plain = code_piece<D, STOCHASTIC, LAYOUT, WIDE>(in, codes + (c - c0), n, encode, q.grid, request.code_bits,
                                                        high + (STOCHASTIC ? int64_t(skipped) + c - c0 : 0));
      }
      if (!plain) carefully(in, r, c, n, first_block, s, ignored, codes + (c - c0), nullptr);
      c = stop;
    }
    const int width = stored_bits(int(request.code_bits));
    pack(codes, c1 - c0, width, request.codes + r * ((cols * width + 7) / 8) + c0 / 8 * width);
  }
  typedef void (Plan::*CodeRow)(const Cell<D> *, int64_t, int64_t, int64_t, const Tile &, const Scratch<D> &, bool,
                                const Cell<D> *) const;
  template <bool STOCHASTIC> CodeRow code_row_for() const {
    if (q.grid.wide) return &Plan::code_row<STOCHASTIC, UNIFORM, true>;
    switch (layout()) {
      case UNIFORM:
        return &Plan::code_row<STOCHASTIC, UNIFORM, false>;
      case BY_SIXTEEN:
        return &Plan::code_row<STOCHASTIC, BY_SIXTEEN, false>;
      default:
        return &Plan::code_row<STOCHASTIC, BY_COLUMN, false>;
    }
  }
  CodeRow chosen_code_row() const { return q.stochastic ? code_row_for<true>() : code_row_for<false>(); }

  // The number of columns that `row` or `code_row` processes at a time: expanded scales need whole blocks, and codes
  // need whole bytes.
  int64_t columns_at_once(const Tile &t) const {
    if (!request.codes) return layout() == UNIFORM ? t.c1 - t.c0 : CHUNK / C * C;
    const int64_t step = layout() == UNIFORM ? 8 : std::lcm(C, int64_t(8));
    return CHUNK / step * step;
  }
  void store_scales(int64_t block_row, const Tile &t, const Scratch<D> &s) const {
    const int64_t first = block_row * block_count_cols + t.c0 / C;
    for (size_t b = 0; b < s.code.size(); b++) {
      const uint32_t code = s.kind[b] == POISONED ? nan_scale_code(q.scaling) : s.code[b];
      if (q.scaling == AMAX) {
        ((uint32_t *)request.scales)[first + int64_t(b)] = code;
      } else {
        ((uint8_t *)request.scales)[first + int64_t(b)] = uint8_t(code);
      }
    }
  }

  // `next` is this thread's next tile; empty if there is none.
  void second_walk(const Tile &t, const Tile &next, Scratch<D> &s) const {
    int64_t stride, TC = request.tally_cols ? request.tally_cols : cols,
                    TR = request.tally_rows ? request.tally_rows : rows;
    int64_t tally_count_cols = (cols + TC - 1) / TC, first_tally = t.c0 / TC;
    const Cell<D> *from = source(t, s, &stride, true);
    std::vector<Tally> tallies(request.tally ? size_t((t.c1 - 1) / TC - first_tally + 1) : 0);
    Row run_row = chosen_row();
    CodeRow run_code_row = chosen_code_row();
    for (int64_t r = t.r0; r < t.r1;) {
      int64_t block_row = r / R, block_end = std::min(t.r1, (block_row + 1) * R);
      find_scales(from + (r - t.r0) * stride, stride, block_end - r, block_row, t, s);
      uint32_t kinds = 0;
      for (uint32_t k : s.kind) kinds |= k;
      bool all_plain = kinds == ORDINARY;
      if (request.scales) store_scales(block_row, t, s);
      while (r < block_end) {
        int64_t end = std::min(block_end, (r / TR + 1) * TR), tally_row = r / TR;
        std::fill(tallies.begin(), tallies.end(), Tally{});
        if (request.amax) note_amax(from + (r - t.r0) * stride, stride, end - r, tally_row, t, s);
        int64_t chunk = columns_at_once(t);
        for (int64_t c0 = t.c0; c0 < t.c1; c0 += chunk) {
          int64_t c1 = std::min(t.c1, c0 + chunk);
          if (layout() != UNIFORM) spread_out(c0, c1, t.c0 / C, s);
          for (int64_t k = r; k < end; k++) {
            const Cell<D> *line = from + (k - t.r0) * stride;
            if (request.codes) {
              (this->*run_code_row)(line, k, c0, c1, t, s, all_plain, fetch_for(k, t, next));
            } else {
              (this->*run_row)(line, k, c0, c1, t, s, all_plain, fetch_for(k, t, next), tallies.data());
            }
          }
        }
        r = end;
        for (size_t b = 0; b < tallies.size(); b++)
          add_to(&request.tally[tally_row * tally_count_cols + first_tally + int64_t(b)], tallies[b]);
      }
    }
  }
};

}  // namespace fb
