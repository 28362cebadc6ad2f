// Converts elements to values or codes: eight ordinary elements at once, all others one by one.
#pragma once
#include "codes.cuh"
#include "remade.cuh"
#include "strip.cuh"

namespace fb {

// True if no element of an ordinary block can overflow: a block's amax is scaled to the grid's largest value, except
// for the error of two roundings, and the midpoint between this value and the next is further away.
FB_D bool never_overflows(const Spec &s) { return s.scaling.divides() && !s.stochastic && s.grid.dropped >= 4; }

// Convert eight ordinary elements to values or codes. If the first 16 random bits of an element do not decide its
// rounding, return false; then the results are invalid and the counts unchanged.
template <class D, bool WIDE>
FB_D bool quickly(const Spec &s, const Vector<D> &x, const Block (&blocks)[WIDTH], const Split &split, uint64_t first,
                  uint64_t seed, Vector<D> *y, Codes *codes, Counts *counts) {
  typedef typename D::Storage S;
  const Grid g = s.grid.grid();
  Words draws{};
  if (s.stochastic) draws = eight_draws(first, ROUND_HIGH, seed);
  Counts now = *counts;
  float on_grid[WIDTH], back[WIDTH];
  uint32_t over[WIDTH];
  uint32_t ask = 0;
  bool asks = false;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    const Scale &scale = blocks[split.col(i)].scale;
    S was = x.get(i);
    float v = fabsf(D::widen(was)) * scale.encode, q;
    uint32_t high = (draws.w[i / 2] >> (16 * (i % 2))) & 0xffffu;
    if (!s.stochastic) {
      q = nearest<WIDE>(v, g);
    } else if (WIDE) {
      q = rounded_at_once<WIDE, true>(v, g, high, &ask);
    } else {
      q = i % 2 ? drawn<true>(v, g, draws.w[i / 2], &asks) : drawn<false>(v, g, draws.w[i / 2], &asks);
    }
    over[i] = never_overflows(s) ? 0u : bits(g.max - q) >> 31;
    q = never_overflows(s) ? q : smaller(q, g.max);
    on_grid[i] = value(bits(q) | uint32_t(was & S(~D::magnitude_mask)) << (32 - 8 * sizeof(S)));
    if (s.encodes) continue;
    back[i] = s.scaling.divides() ? quotient(q, scale.encode, scale.decode) : (q * scale.decode) * scale.outer;
  }
  if (!s.encodes) {
    constexpr uint32_t SIGNS = sizeof(S) == 2 ? 0x80008000u : SIGN;
    Vector<D> from, to;  // magnitudes
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) to.set_two(i, back[i], back[i + 1]);
#pragma unroll
    for (int j = 0; j < Vector<D>::WORDS; j++) {
      from.w[j] = x.w[j] & ~SIGNS;
      y->w[j] = to.w[j] | (x.w[j] & SIGNS);
    }
    if (s.stats && WIDE) {
#pragma unroll
      for (int i = 0; i < WIDTH; i++) now.count(D::widen(from.get(i)), D::widen(to.get(i)), over[i]);
    } else if (s.stats) {
      count_ordinary<D>(from, to, over, &now);
    }
  }
  if (!ask && !asks) *counts = now;
  if (s.encodes) *codes = codes_of(s, on_grid);
  return !ask && !asks;
}

FB_D uint32_t careful_code(const Spec &s, const Request &r, const Element &e, const Block &b) {
  uint32_t code = finite(e.q)                      ? magnitude_code(e.q, s.grid.grid())
                  : b.poisoned                     ? 0
                  : (bits(e.q) & MAGNITUDE) == INF ? r.inf_code
                                                   : r.nan_code;
  return code | (e.q == e.q ? (bits(e.q) >> 31) << (s.encodes - 1) : 0);  // NaN has no sign
}

// Converts the slots that `quickly` cannot convert: slots with blocks that are not ordinary, or with an element whose
// first 16 random bits do not decide. They are rare, so this code is small rather than fast: it computes everything
// again from indices, so that the common path needs no additional registers.
template <class D> struct Careful {
  const Spec &s;
  const Request &r;
  const Tile &t;
  const Vector<D> (&x)[SLOTS];
  const uint32_t (&left)[SLOTS][WIDTH];  // ON_CHIP: the values from which `known` rebuilds the blocks
  Gathering<Counts> &gathering;
  Codes (&kept)[SLOTS];  // receives the codes if they are transposed

  FB_D Block block_of(const Tops &tops, int k, int n) const {
    if (s.source == LOOKUP) return looked_up<D>(s, r, t.row(k), t.col(k) + n);
    if (s.source == STRIP) return strip_blocks()[strip_column(t) + n];
    return known<D>(s, r, tops.at(Split(s), n), t.row(k), t.col(k) + n);
  }
  FB_D void element(const Tops &tops, int k, int n, float was, Codes *codes) {
    int row = t.row(k), col = t.col(k) + n;
    bool by_element = s.piece == ELEMENTS && (s.stats || s.skips);
    if (by_element && s.skips && r.skip[r.parts.at(row, col)]) return;
    Block b = block_of(tops, k, n);
    uint64_t index = t.index(k) + uint64_t(n);
    Element e{value(NAN_BITS), value(NAN_BITS), false};
    if (!b.poisoned)
      e = fb::element<D>(was, s.grid.grid(), b.scale, s.scaling.divides(), s.stochastic, index, r.key(s));
    typename D::Storage narrow = D::narrow(e.y);
    if (r.out) ((typename D::Storage *)r.out)[index] = narrow;
    if (s.stats) {
      gathering.sum.count(was, D::widen(narrow), e.saturated);
      if (by_element) gathering.hand_in(true, row, col);
    }
    if (s.encodes) codes->put(n, careful_code(s, r, e, b), stored_bits(s.encodes));
    if (s.encodes && s.source == LOOKUP && s.block_piece == ELEMENTS) store_scale(s, r, b, row, col);
  }
  FB_D void all(uint32_t slots) {
#pragma unroll 1
    for (int k = 0; k < SLOTS; k++) {
      if (!(slots >> k & 1)) continue;
      Vector<D> v = picked<D>(x, k);
      const Tops tops = s.source == ON_CHIP ? tops_of(Split(s), left, k) : Tops{};
      int valid = t.valid(k);
      Codes codes{0, 0};
#pragma unroll 1
      for (int n = 0; n < valid; n++) element(tops, k, n, D::widen(v.pick(n)), &codes);
      if (transposes(s)) {
#pragma unroll
        for (int j = 0; j < SLOTS; j++)
          if (j == k) kept[j] = codes;
      } else if (s.encodes) {
        store_codes(r.codes, t.row(k), t.col(k), codes, valid, stored_bits(s.encodes));
      }
      // The other threads have already added their sums for this part to the results; this thread adds its sum alone.
      if (s.stats && s.piece == VECTORS) gathering.hand_in(true, t.row(k), t.col(k));
    }
  }
};

}  // namespace fb
