// The second pass of a plan: converts rows to values or codes, by the fast loops or element by element.
#pragma once
#include "plan_amaxes.h"
#include "plan_scales.h"

namespace fb {

// Prefetch the cache lines of n columns from `from` on; null: nothing to prefetch.
template <class D> void prefetch(const Cell<D> *from, int n) {
  for (int i = 0; from && i < n; i += int(64 / sizeof(Cell<D>))) __builtin_prefetch(from + i, 0, 2);
}

// Quantize n columns of row r from column c on, element by element, into `to`; if not null, also write the codes, and
// add the statistics to `tally`. first_block: the first block of the tile in its row.
template <class D>
void Plan<D>::carefully(const Cell<D> *from, int64_t r, int64_t c, int n, int64_t first_block, const Scratch<D> &s,
                        Cell<D> *to, uint16_t *codes, Tally *tally) const {
  for (int i = 0; i < n; i++) {
    size_t b = size_t((c + i) / C - first_block);
    float was = D::widen(from[i]);
    uint64_t index = uint64_t(r * cols + c + i);
    Element e{value(NAN_BITS), value(NAN_BITS), false};
    if (s.care[b] != POISONED)
      e = element<D>(was, q.grid, scale_at(s, b), q.scaling.divides(), q.stochastic, index, q.seed);
    to[i] = D::narrow(e.y);
    if (codes) {
      uint32_t code = finite(e.q)                   ? magnitude_code(e.q, q.grid)
                      : s.care[b] == POISONED       ? 0
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

// Process again only those of n ordinary columns whose first 16 random bits do not decide the rounding. There is such a
// column in about every 500th piece.
template <class D>
template <Layout LAYOUT, bool WIDE>
void Plan<D>::settle(const Cell<D> *from, int64_t r, int64_t c, int n, int64_t first_block, const Scratch<D> &s,
                     const float *encode, const uint16_t *high, Cell<D> *to) const {
  for (int i = 0; i < n; i++) {
    const float v = magnitude(D::widen(from[i])) * encode[LAYOUT == UNIFORM ? 0 : LAYOUT == BY_SIXTEEN ? i / GROUP : i];
    uint32_t ask = 0;
    rounded_at_once<WIDE, true>(v, q.grid, high[i], &ask);
    if (ask) carefully(from + i, r, c + i, 1, first_block, s, to + i, nullptr, nullptr);
  }
}

// Quantize columns [c0, c1) of row r. from: the start of the row in the tile. all_plain: all blocks are ordinary.
// fetch: the row to prefetch. tallies: the statistics of the tally blocks.
template <class D>
template <bool DIVIDE, bool STOCHASTIC, bool STATS, Layout LAYOUT, bool WIDE>
void Plan<D>::row(const Cell<D> *from, int64_t r, int64_t c0, int64_t c1, const Tile &t, const Scratch<D> &s,
                  bool all_plain, const Cell<D> *fetch, Tally *tallies) const {
  int64_t TC = request.tally_cols ? request.tally_cols : cols, TR = request.tally_rows ? request.tally_rows : rows;
  int64_t tally_count_cols = (cols + TC - 1) / TC, first_block = t.c0 / C;
  Cell<D> *out = (Cell<D> *)request.out;
  uint16_t high[STOCHASTIC ? CHUNK + 2 * PIECE : 1];
  int64_t drawn_from = 0, drawn_to = c0;  // the columns whose random bits are in `high`
  int64_t tally_col = c0 / TC, block = c0 / C;
  // A piece has one second-level value, except in the layout EACH_COLUMN.
  const int64_t group_cols = q.group && !q.down ? q.group * C : cols;
  int64_t group_end = (c0 / group_cols + 1) * group_cols;
  for (int64_t c = c0; c < c1;) {
    // Divisions take long, so they are avoided where the next piece is in the same block or in the next one.
    tally_col += c == (tally_col + 1) * TC;
    block = LAYOUT == UNIFORM ? block + (c == (block + 1) * C) : c / C;
    group_end += c == group_end ? group_cols : 0;
    int64_t stop = std::min(std::min(std::min(c + PIECE, c1), (tally_col + 1) * TC), group_end);
    if (LAYOUT == UNIFORM) stop = std::min(stop, (block + 1) * C);
    int n = int(stop - c);
    if (request.skip && request.skip[r / TR * tally_count_cols + tally_col]) {
      c = stop;
      continue;
    }
    alignas(64) Cell<D> piece_out[PIECE];
    const Cell<D> *in = from + (c - t.c0);
    if (fetch) prefetch<D>(fetch + (c - t.c0), n);
    Tally *tally = STATS ? tallies + (tally_col - t.c0 / TC) : nullptr;
    bool plain = all_plain || all_ordinary(s, block - first_block, (stop - 1) / C - first_block);
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
      const float *outer = LAYOUT == EACH_COLUMN ? &s.outer[size_t(at)] : &s.block_outer[b];
      Counts k = piece<D, DIVIDE, STOCHASTIC, STATS, LAYOUT, WIDE>(in, piece_out, n, encode, decode, outer, q.grid,
                                                                   STOCHASTIC ? high + (c - drawn_from) : nullptr);
      if (k.again && STOCHASTIC && !STATS) {
        settle<LAYOUT, WIDE>(in, r, c, n, first_block, s, encode, high + (c - drawn_from), piece_out);
      } else if (k.again) {
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

// Compute the codes of columns [c0, c1) of row r; used instead of `row` to encode.
template <class D>
template <bool STOCHASTIC, Layout LAYOUT, bool WIDE>
void Plan<D>::code_row(const Cell<D> *from, int64_t r, int64_t c0, int64_t c1, const Tile &t, const Scratch<D> &s,
                       bool all_plain, const Cell<D> *fetch, uint16_t *codes) const {
  const int64_t first_block = t.c0 / C;
  uint16_t high[STOCHASTIC ? CHUNK + 2 * PIECE : 1];
  Cell<D> ignored[PIECE];
  const uint64_t index = uint64_t(r * cols + c0), skipped = index % 8;
  if (STOCHASTIC) fill_high(index - skipped, c1 - c0 + int64_t(skipped), q.seed, high);
  for (int64_t c = c0; c < c1;) {
    int64_t block = c / C, stop = std::min(c + PIECE, c1);
    if (LAYOUT == UNIFORM) stop = std::min(stop, (block + 1) * C);
    int n = int(stop - c);
    const Cell<D> *in = from + (c - t.c0);
    if (fetch) prefetch<D>(fetch + (c - t.c0), n);
    bool plain = all_plain || all_ordinary(s, block - first_block, (stop - 1) / C - first_block);
    if (plain) {
      int64_t at = LAYOUT == BY_SIXTEEN ? (c - c0) / GROUP : c - c0;
      const float *encode = LAYOUT == UNIFORM ? &s.block_encode[size_t(block - first_block)] : &s.encode[size_t(at)];
      plain = code_piece<D, STOCHASTIC, LAYOUT, WIDE>(in, codes + (c - c0), n, encode, q.grid, request.code_bits,
                                                      high + (STOCHASTIC ? int64_t(skipped) + c - c0 : 0));
    }
    if (!plain) carefully(in, r, c, n, first_block, s, ignored, codes + (c - c0), nullptr);
    c = stop;
  }
}

// Store the codes of columns [c0, c1) of n rows from r on, which are CHUNK apart; n is 1, unless an operand is
// transposed. The first column, or if the operand is transposed the first row, is a multiple of 8, so its code starts
// at a byte.
template <class D>
void Plan<D>::store_codes(const uint16_t *codes, int64_t r, int64_t n, int64_t c0, int64_t c1) const {
  const int width = stored_bits(int(request.code_bits));
  if (transposes()) {
    const int64_t stride = (rows * width + 7) / 8;
    return pack_transposed(codes, n, c1 - c0, width, request.codes + c0 * stride + r * width / 8, stride);
  }
  pack(codes, c1 - c0, width, request.codes + r * ((cols * width + 7) / 8) + c0 / 8 * width);
}

// Return the row to prefetch while row r is processed: usually a row of the next row of blocks, in this tile or in the
// thread's next tile; null if there is no such row.
template <class D> const Cell<D> *Plan<D>::fetch_for(int64_t r, const Tile &t, const Tile &next) const {
  int64_t target = q.hadamard && !staged ? t.r1 + (r - t.r0) : r + (lookup ? 2 : R);
  if (target < t.r1) return second_source() + target * cols + t.c0;
  target = next.r0 + (target - t.r1);
  return target < next.r1 ? second_source() + target * cols + next.c0 : nullptr;
}

// Process a tile in the second pass. `next` is the thread's next tile, or empty.
template <class D> void Plan<D>::second_walk(const Tile &t, const Tile &next, Scratch<D> &s) const {
  int64_t stride, TC = request.tally_cols ? request.tally_cols : cols,
                  TR = request.tally_rows ? request.tally_rows : rows;
  int64_t tally_count_cols = (cols + TC - 1) / TC, first_tally = t.c0 / TC;
  const Cell<D> *from = source(t, s, &stride, true);
  std::vector<Tally> tallies(request.tally ? size_t((t.c1 - 1) / TC - first_tally + 1) : 0);
  Row run_row = chosen_row();
  CodeRow run_code_row = chosen_code_row();
  uint16_t codes[GROUP * CHUNK];
  for (int64_t r = t.r0; r < t.r1;) {
    int64_t block_row = r / R, block_end = std::min(t.r1, (block_row + 1) * R);
    find_scales(from + (r - t.r0) * stride, stride, block_end - r, block_row, t, s);
    bool all_plain = all_ordinary(s, 0, int64_t(s.care.size()) - 1);
    if (request.scales) store_scales(block_row, t, s);
    while (r < block_end) {
      int64_t end = std::min(block_end, (r / TR + 1) * TR), tally_row = r / TR;
      std::fill(tallies.begin(), tallies.end(), Tally{});
      if (request.amax) note_amax(from + (r - t.r0) * stride, stride, end - r, tally_row, t, s);
      int64_t chunk = columns_at_once(t);
      for (int64_t c0 = t.c0; c0 < t.c1; c0 += chunk) {
        int64_t c1 = std::min(t.c1, c0 + chunk);
        if (layout() != UNIFORM) spread_out(c0, c1, t.c0 / C, s);
        const int64_t together = transposes() ? GROUP : 1;
        for (int64_t k = r; k < end; k++) {
          const Cell<D> *line = from + (k - t.r0) * stride;
          if (request.codes) {
            const int64_t before = (k - r) % together, n = before + 1;
            (this->*run_code_row)(line, k, c0, c1, t, s, all_plain, fetch_for(k, t, next), codes + before * CHUNK);
            if (n == together || k + 1 == end) store_codes(codes, k - before, n, c0, c1);
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

}  // namespace fb
