// The quantization of a matrix on a GPU, with a tile per CTA.
//
//   quantize   one pass if blocks fit in tiles: loads, rotates, finds amaxes and scales, rounds, counts, stores;
//              for one or two quantizers from the same read
//   measure    a pass before it if scales span more: amaxes of large blocks, or of groups of small ones
//   weigh      a pass between them for Four Over Six in large blocks: compares the errors of its two scales
//   extent     largest and smallest non-zero magnitudes of the parts of a matrix
//
// Maxima are integers and sums are of integers, so no bit depends on the order of threads.
#include "codes.cuh"
#include "rotate.cuh"

namespace fb {

struct Maximum {
  typedef uint32_t *Target;
  uint32_t top;  // float32 bits
  FB_D void join(const Maximum &m) { top = larger(top, m.top); }
  FB_D Maximum shuffled(int distance) const { return Maximum{__shfl_xor_sync(ALL, top, distance)}; }
  FB_D void hand_in(Target to, int64_t part) const { atomicMax(to + part, top); }
};

struct Extent {
  struct Target {
    uint32_t *top, *bottom;
  };
  uint32_t top, missing;  // missing: infinity minus the smallest, so that 0 is neutral here too
  FB_D void take(uint32_t magnitude) {
    top = larger(top, magnitude);
    if (magnitude && magnitude < INF) missing = larger(missing, INF - magnitude);
  }
  FB_D void join(const Extent &e) { top = larger(top, e.top), missing = larger(missing, e.missing); }
  FB_D Extent shuffled(int distance) const {
    return Extent{__shfl_xor_sync(ALL, top, distance), __shfl_xor_sync(ALL, missing, distance)};
  }
  FB_D void hand_in(const Target &to, int64_t part) const {
    atomicMax(to.top + part, top);
    atomicMin(to.bottom + part, INF - missing);
  }
};

struct Weighed {  // see four_less_six
  typedef int64_t *Target;
  int64_t sum;
  FB_D void join(const Weighed &w) { sum += w.sum; }
  FB_D Weighed shuffled(int d) const {
    uint64_t high = __shfl_xor_sync(ALL, uint32_t(uint64_t(sum) >> 32), d),
             low = __shfl_xor_sync(ALL, uint32_t(sum), d);
    return Weighed{int64_t(high << 32 | low)};
  }
  FB_D void hand_in(Target to, int64_t part) const {
    atomicAdd((unsigned long long *)to + part, (unsigned long long)sum);
  }
};

struct Counts {  // for at most 2^14 elements: halves of words hold two of them
  struct Target {
    int64_t *tally;
    uint32_t *amax;
  };
  uint64_t error;
  uint32_t nonzero_flushed, saturated_capped, nonfinite_lost, top;

  FB_D void count(float was, float back, bool overflowed) {
    bool capped, some = was != 0.0f;
    uint32_t units = error_units(was, back, &capped);
    error += some ? units : 0;
    nonzero_flushed += uint32_t(some) | uint32_t(some && back == 0.0f) << 16;
    saturated_capped += uint32_t(overflowed && back != 0.0f) | uint32_t(capped) << 16;
    nonfinite_lost += uint32_t(!finite(was)) | uint32_t(!finite(back)) << 16;
    top = larger(top, bits(was) & MAGNITUDE);
  }
  FB_D void join(const Counts &c) {
    error += c.error, nonzero_flushed += c.nonzero_flushed, saturated_capped += c.saturated_capped;
    nonfinite_lost += c.nonfinite_lost, top = larger(top, c.top);
  }
  FB_D Counts shuffled(int d) const {
    uint64_t high = __shfl_xor_sync(ALL, uint32_t(error >> 32), d), low = __shfl_xor_sync(ALL, uint32_t(error), d);
    return Counts{high << 32 | low, __shfl_xor_sync(ALL, nonzero_flushed, d), __shfl_xor_sync(ALL, saturated_capped, d),
                  __shfl_xor_sync(ALL, nonfinite_lost, d), __shfl_xor_sync(ALL, top, d)};
  }
  FB_D void hand_in(const Target &to, int64_t part) const {
    uint64_t each[7] = {error,
                        nonzero_flushed & 0xffffu,
                        nonzero_flushed >> 16,
                        saturated_capped & 0xffffu,
                        saturated_capped >> 16,
                        nonfinite_lost & 0xffffu,
                        nonfinite_lost >> 16};
#pragma unroll
    for (int i = 0; i < 7; i++)
      if (each[i]) atomicAdd((unsigned long long *)to.tally + 7 * part + i, (unsigned long long)each[i]);
    atomicMax(to.amax + part, top);
  }
};

// ------------------------------------------------------------------------------------------------ scales

struct Block {
  Scale scale;
  bool plain, poisoned;
};
template <class D>
FB_D Block make_block(const Spec &s, const Request &r, uint32_t amax, int row, int col, float expansion = 1.0f) {
  Group group{1.0f, 1.0f};
  if (grouped(s)) {
    int rows = s.source == LOOKUP ? r.blocks.rows : s.block_rows;
    int cols = s.source == LOOKUP ? r.blocks.cols : s.block_cols;
    int g = s.group_by_row ? group_index(s, row / rows, col / cols) : 0;
    group = make_group(s.scaling, value(s.max), value(r.group_amax[g]));
  }
  Block b;
  b.scale = make_scale(s.scaling, value(s.max), value(amax), group, expansion);
  b.poisoned = s.scaling != NONE && amax >= INF;
  b.plain = !exact_only(s) && !b.poisoned && ordinary<D>(s, amax, b.scale);
  return b;
}
template <class D> FB_D Block looked_up(const Spec &s, const Request &r, int row, int col) {
  int64_t at = r.blocks.at(row, col);
  bool four = s.scaling == FOUROVERSIX && r.four_less_six[at] < 0;
  return make_block<D>(s, r, r.block_amax[at], row, col, four ? FOUR : 1.0f);
}

// MS-EDEN: replaces the amaxes of blocks by what their scales are rebuilt from. Rotations, and so tiles, hold whole
// blocks; at most two threads share one, and they are in one warp.
enum Remade : uint32_t { NEAREST = 0xffu, DRAWN = 0xff00u, PLAIN = 0x10000u, NOT_FINITE = 0x20000u };
template <class D>
FB_D void correct_blocks(const Spec &s, const Request &r, const Tile &t, const Vector<D> (&x)[SLOTS],
                         uint32_t (&amax)[SLOTS][WIDTH]) {
  const Split split(s);
  const Grid g = grid_of(s);
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
        uint32_t drawn = corrected(b.scale, sums, number, r.seed).code;
        amax[k][i] = b.poisoned ? NOT_FINITE
                                : b.scale.code | drawn << 8 | (b.plain && (drawn || top == 0) ? uint32_t(PLAIN) : 0u);
      }
}
// The 16 bits of each of eight consecutive elements, two per word.
FB_D Words eight_draws(uint64_t first, uint32_t stream, uint64_t seed) {
  Words a = philox(first >> 3, stream, seed);
  uint32_t skew = uint32_t(first) & 7;
  if (skew == 0) return a;
  Words b = philox((first >> 3) + 1, stream, seed);
  uint32_t w[8] = {a.w[0], a.w[1], a.w[2], a.w[3], b.w[0], b.w[1], b.w[2], b.w[3]};
#pragma unroll
  for (int i = 0; i < 6; i++) w[i] = skew & 4 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; i++) w[i] = skew & 2 ? w[i + 1] : w[i];
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = skew & 1 ? w[i] >> 16 | w[i + 1] << 16 : w[i];
  return Words{{w[0], w[1], w[2], w[3]}};
}

// What is kept of the blocks in a slot, by an index unknown to the compiler.
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

// Four Over Six: adds to a block's amax a bit that says that its largest value becomes 4. Threads that share a block
// are in one warp. Every element is divided twice: slots take turns, so that one piece of code serves all.
constexpr uint32_t AT_FOUR = 0x80000000u;
FB_D FourOverSix four_over_six(const Spec &s, const Group &group, float amax) {
  float max = value(s.max);
  return FourOverSix{make_scale(s.scaling, max, amax, group), make_scale(s.scaling, max, amax, group, FOUR), amax};
}
template <class D>
FB_D void choose_fours(const Spec &s, const Request &r, const Tile &t, const Vector<D> (&x)[SLOTS],
                       uint32_t (&amax)[SLOTS][WIDTH]) {
  typedef typename D::Storage S;
  const Split split(s);
  const Grid g = grid_of(s);
  const Group group = make_group(s.scaling, g.max, value(r.group_amax[0]));
  Weighed weighed[SLOTS][WIDTH] = {};
#pragma unroll 1
  for (int m = 0; m < SLOTS; m++) {
    const Vector<D> v = picked<D>(x, m);
    const Tops tops = tops_of(split, amax, m);
    Words draws{};
    if (s.stochastic) draws = eight_draws(t.index(m), ROUND_HIGH, r.seed);
    int64_t sums[WIDTH] = {};
    uint32_t ask = 0;
#pragma unroll 1
    for (int n = 0; n < WIDTH; n += 2) {
      uint32_t word = draws.w[0];
#pragma unroll
      for (int i = 1; i < WIDTH / 2; i++) word = n == 2 * i ? draws.w[i] : word;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const FourOverSix b = four_over_six(s, group, D::widen(S(tops.at(split, n + i))));
        float size = D::widen(S(v.pick(n + i) & D::magnitude_mask));
        uint32_t high = (word >> (16 * i)) & 0xffffu;
        int64_t one = s.stochastic ? four_less_six_at_once<true>(size, g, b, high, &ask)
                                   : four_less_six_at_once<false>(size, g, b, high, &ask);
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
          if (split.starts(0, j)) sums[j] += split.col(n + i) == j ? one : 0;
      }
    }
    if (ask) {
#pragma unroll
      for (int i = 0; i < WIDTH; i++) sums[i] = 0;
#pragma unroll 1
      for (int n = 0; n < WIDTH; n++) {
        const FourOverSix b = four_over_six(s, group, D::widen(S(tops.at(split, n))));
        uint64_t index = t.index(m) + uint64_t(n);
        float size = D::widen(S(v.pick(n) & D::magnitude_mask));
        int64_t one = four_less_six(size, g, b, true, rounding_high(index, r.seed), index, r.seed);
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
          if (split.starts(0, i)) sums[i] += split.col(n) == i ? one : 0;
      }
    }
#pragma unroll
    for (int k = 0; k < SLOTS; k++)
#pragma unroll
      for (int i = 0; i < WIDTH; i++)
        if (split.starts(k, i)) weighed[k][i].sum += split.row(m) == k ? sums[i] : 0;
  }
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (split.starts(k, i)) {
#pragma unroll
        for (int d = 1; d < WARP; d *= 2)
          if (d < s.block_cols / WIDTH) weighed[k][i].join(weighed[k][i].shuffled(d));
#pragma unroll
        for (int d = 1; d < WARP; d *= 2)
          if (d < s.block_rows / SLOTS) weighed[k][i].join(weighed[k][i].shuffled(d * shape().lanes));
        if (weighed[k][i].sum < 0) amax[k][i] |= AT_FOUR;
      }
}
// Rebuild a block from what is kept of it: its amax in storage bits, or for MS-EDEN and Four Over Six as above.
template <class D> FB_D Block known(const Spec &s, const Request &r, uint32_t left, int row, int col) {
  if (s.scaling == FOUROVERSIX)
    return make_block<D>(s, r, bits(D::widen(typename D::Storage(left & ~AT_FOUR))), row, col,
                         left & AT_FOUR ? FOUR : 1.0f);
  if (s.scaling != EDEN) return make_block<D>(s, r, bits(D::widen(typename D::Storage(left))), row, col);
  Block b{two_level_scale(e4m3_value(left & NEAREST), make_group(s.scaling, value(s.max), value(r.group_amax[0]))),
          (left & PLAIN) != 0, (left & NOT_FINITE) != 0};
  b.scale.code = (left & DRAWN) >> 8;
  b.scale.decode = e4m3_value(b.scale.code);
  return b;
}

// Store a block's scale from the thread that has its first element, and a group's from that of its first block.
FB_D void store_scale(const Spec &s, const Request &r, const Block &b, int row, int col) {
  if (s.scaling == NONE) return;
  const int rows = s.source == LOOKUP ? r.blocks.rows : s.block_rows;
  const int cols = s.source == LOOKUP ? r.blocks.cols : s.block_cols;
  if (row % rows || col % cols) return;
  const int block_row = row / rows, block_col = col / cols;
  const int64_t at = int64_t(block_row) * r.blocks.across + block_col;
  const uint32_t code = b.poisoned ? nan_scale_code(s.scaling) : b.scale.code;
  if (s.scaling == AMAX) {
    ((uint32_t *)r.scales)[at] = code;
  } else {
    ((uint8_t *)r.scales)[at] = uint8_t(code);
  }
  const bool first = s.group_by_row ? (s.down ? block_row : block_col) == 0 : block_row + block_col == 0;
  if (!grouped(s) || !first) return;
  const int group = group_index(s, block_row, block_col);
  const Group shared = make_group(s.scaling, value(s.max), value(r.group_amax[group]));
  r.group_scales[group] = s.scaling == GAM ? value(mantissa(shared.encode) | 0x3f800000u) : shared.decode;
}

// ------------------------------------------------------------------------------------------------ elements

// Eight ordinary elements as values or as codes; false, without effect, if a draw needs its low bits.
template <class D, bool WIDE>
FB_D bool quickly(const Spec &s, const Vector<D> &x, const Block (&blocks)[WIDTH], const Split &split, uint64_t first,
                  uint64_t seed, Vector<D> *y, Codes *codes, Counts *counts) {
  typedef typename D::Storage S;
  const Grid g = grid_of(s);
  Words draws{};
  if (s.stochastic) draws = eight_draws(first, ROUND_HIGH, seed);
  Counts now = *counts;
  float on_grid[WIDTH];
  uint32_t ask = 0;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    const Scale &scale = blocks[split.col(i)].scale;
    S was = x.get(i);
    float size = D::widen(S(was & D::magnitude_mask)), v = size * scale.encode, q;
    uint32_t high = (draws.w[i / 2] >> (16 * (i % 2))) & 0xffffu;
    q = s.stochastic ? rounded_at_once<WIDE, true>(v, g, high, &ask) : rounded_at_once<WIDE, false>(v, g, high, &ask);
    bool over = q > g.max;
    q = smaller(q, g.max);
    on_grid[i] = value(bits(q) | uint32_t(was & S(~D::magnitude_mask)) << (32 - 8 * sizeof(S)));
    if (s.encodes) continue;
    float back = divides(s) ? quotient(q, scale.encode, scale.decode) : (q * scale.decode) * scale.outer;
    S narrow = D::narrow(back);
    y->set(i, S(narrow | (was & S(~D::magnitude_mask))));
    if (s.stats) now.count(size, D::widen(narrow), over);
  }
  if (!ask) *counts = now;
  if (s.encodes) *codes = codes_of(s, on_grid);
  return !ask;
}

FB_D uint32_t careful_code(const Spec &s, const Request &r, const Element &e, const Block &b) {
  uint32_t code = finite(e.q)                      ? magnitude_code(e.q, grid_of(s))
                  : b.poisoned                     ? 0
                  : (bits(e.q) & MAGNITUDE) == INF ? r.inf_code
                                                   : r.nan_code;
  return code | (e.q == e.q ? (bits(e.q) >> 31) << (s.encodes - 1) : 0);  // NaN has no sign
}

// Elements that are not ordinary: slots with other blocks, or with a draw that needs its low bits. They are rare, so
// the code is written to be small: it finds everything again by index, so that the common path pays neither registers
// nor code.
template <class D> struct Careful {
  const Spec &s;
  const Request &r;
  const Tile &t;
  const Vector<D> (&x)[SLOTS];
  const uint32_t (&left)[SLOTS][WIDTH];  // ON_CHIP: what is kept of the blocks, see `known`
  Gathering<Counts> &gathering;

  FB_D Block block_of(const Tops &tops, int k, int n) const {
    if (s.source == LOOKUP) return looked_up<D>(s, r, t.row(k), t.col(k) + n);
    return known<D>(s, r, tops.at(Split(s), n), t.row(k), t.col(k) + n);
  }
  FB_D void element(const Tops &tops, int k, int n, float was, Codes *codes) {
    int row = t.row(k), col = t.col(k) + n;
    bool by_element = s.piece == ELEMENTS && (s.stats || s.skips);
    if (by_element && s.skips && r.skip[r.parts.at(row, col)]) return;
    Block b = block_of(tops, k, n);
    uint64_t index = t.index(k) + uint64_t(n);
    Element e{value(NAN_BITS), value(NAN_BITS), false};
    if (!b.poisoned) e = fb::element<D>(was, grid_of(s), b.scale, s.scaling, s.stochastic, index, r.seed);
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
      const Tops tops = s.source == LOOKUP ? Tops{} : tops_of(Split(s), left, k);
      int valid = t.valid(k);
      Codes codes{0, 0};
#pragma unroll 1
      for (int n = 0; n < valid; n++) element(tops, k, n, D::widen(v.pick(n)), &codes);
      if (s.encodes) store_codes(r.codes, t.row(k), t.col(k), codes, valid, stored_bits(s.encodes));
      // The slot's other vectors of this part have been handed in: this one is handed in separately.
      if (s.stats && s.piece == VECTORS) gathering.hand_in(true, t.row(k), t.col(k));
    }
  }
};

// ------------------------------------------------------------------------------------------------ tiles

template <class D> FB_D void quantize_tile(const Spec &s, const Request &r, const Tile &t, Vector<D> (&x)[SLOTS]) {
  rotate<D>(s, r.signs, t, x);
  const Split split(s);
  uint32_t amax[SLOTS][WIDTH];
  if (s.source == ON_CHIP) block_amaxes<D>(s, t, x, amax);
  if (s.scaling == EDEN) correct_blocks<D>(s, r, t, x, amax);
  if (s.scaling == FOUROVERSIX && s.source == ON_CHIP) choose_fours<D>(s, r, t, x, amax);
  Gathering<Counts> gathering(s.piece, r.parts, t, Counts::Target{r.tally, r.part_amax});
  bool by_element = s.piece == ELEMENTS && (s.stats || s.skips);
  uint32_t careful = 0, ready = 0;  // one bit per slot
  Block blocks[WIDTH];
#pragma unroll
  for (int k = 0; k < SLOTS; k++) {
    bool inside = t.valid(k) > 0, plain = true;
    if (s.source == LOOKUP) {
      plain = s.block_piece != ELEMENTS;
      if (inside && plain && (k == 0 || s.block_piece == VECTORS)) {
        blocks[0] = looked_up<D>(s, r, t.row(k), t.col(k));
        if (s.encodes) store_scale(s, r, blocks[0], t.row(k), t.col(k));
      }
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; i++)
        if (split.starts(k, i)) {
          // Beyond the matrix the last group is looked up, without effect: groups end where the matrix does.
          const int row = t.row(k) < t.rows ? t.row(k) : t.rows - 1,
                    col = t.col(k) + i < t.cols ? t.col(k) + i : t.cols - 1;
          blocks[i] = known<D>(s, r, amax[k][i], row, col);
          if (s.encodes && t.valid(k) > i) store_scale(s, r, blocks[i], t.row(k), t.col(k) + i);
        }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (split.starts(0, i)) plain = plain && blocks[i].plain;
    bool skipped = s.skips && !by_element && inside && r.skip[r.parts.at(t.row(k), t.col(k))];
    if (inside && !skipped) {
      bool done = false;
      if (!exact_only(s) && plain && !by_element) {
        Vector<D> y = {};
        Codes codes{0, 0};
        done = s.wide ? quickly<D, true>(s, x[k], blocks, split, t.index(k), r.seed, &y, &codes, &gathering.sum)
                      : quickly<D, false>(s, x[k], blocks, split, t.index(k), r.seed, &y, &codes, &gathering.sum);
        if (done && s.encodes) store_codes(r.codes, t.row(k), t.col(k), codes, t.valid(k), stored_bits(s.encodes));
        if (done && !s.encodes) x[k] = y, ready |= 1u << k;
      }
      if (!done) careful |= 1u << k;
    }
    if (s.stats) gathering.after_vector(k);
  }
  if (r.out) store<D>(r.out, t, x, ready);
  if (careful) Careful<D>{s, r, t, x, amax, gathering}.all(careful);
  if (s.stats) gathering.after_all();
}

// True if there is nothing to do: there is one part, and it is skipped.
FB_D bool all_skipped(const Call &call, const Request &r) {
  return r.skip && r.parts.rows >= call.rows && r.parts.cols >= call.cols && r.skip[0];
}

template <class D> FB_D void quantize(const Call &call) {
  if (spec_count() == 1 && all_skipped(call, call.requests[0])) return;
  Tile t(call.rows, call.cols, call.aligned, call.backwards);
  Vector<D> x[SLOTS];
  load<D>(call.x, t, spec_count() > 1, x);
  if (spec_count() == 1) {
    quantize_tile<D>(spec<0>(), call.requests[0], t, x);
  } else {
    quantize_tile<D>(spec<0>(), call.requests[0], t, x);
    load<D>(call.x, t, false, x);  // still in the cache; both would need too many registers
    quantize_tile<D>(spec<1>(), call.requests[1], t, x);
  }
}

template <class D> FB_D void measure_tile(const Spec &s, const Request &r, const Tile &t, Vector<D> (&x)[SLOTS]) {
  if (s.source == ON_CHIP && !grouped(s)) return;
  rotate<D>(s, r.signs, t, x);
  if (s.source == LOOKUP) {
    Gathering<Maximum> blocks(s.block_piece, r.blocks, t, r.block_amax);
#pragma unroll
    for (int k = 0; k < SLOTS; k++) {
#pragma unroll
      for (int i = 0; i < WIDTH; i++) {
        blocks.sum.top = larger(blocks.sum.top, bits(D::widen(x[k].get(i))) & MAGNITUDE);
        blocks.after_element(k, i);
      }
      blocks.after_vector(k);
    }
    blocks.after_all();
    return;
  }
  const Split split(s);
  uint32_t amax[SLOTS][WIDTH];
  block_amaxes<D>(s, t, x, amax);
  Maximum finite{0};
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (split.starts(k, i) && amax[k][i] < D::inf) {
        uint32_t top = bits(D::widen(typename D::Storage(amax[k][i])));
        if (!s.group_by_row) {
          finite.top = larger(finite.top, top);
        } else if (t.valid(k) > i) {
          atomicMax(&r.group_amax[group_index(s, t.row(k) / s.block_rows, (t.col(k) + i) / s.block_cols)], top);
        }
      }
  if (s.group_by_row) return;
  const Parts whole{0x7fffffff, 0x7fffffff, 1, 1, 1};
  Gathering<Maximum> group(TILES, whole, t, r.group_amax);
  group.sum = finite;
  group.after_all();
}

template <class D> FB_D void measure(const Call &call) {
  if (spec_count() == 1 && all_skipped(call, call.requests[0])) return;
  Tile t(call.rows, call.cols, call.aligned, call.backwards);
  Vector<D> x[SLOTS];
  load<D>(call.x, t, true, x);
  if (spec_count() == 1) {
    measure_tile<D>(spec<0>(), call.requests[0], t, x);
  } else {
    measure_tile<D>(spec<0>(), call.requests[0], t, x);
    load<D>(call.x, t, true, x);
    measure_tile<D>(spec<1>(), call.requests[1], t, x);
  }
}

template <class D> FB_D void weigh_tile(const Spec &s, const Request &r, const Tile &t, Vector<D> (&x)[SLOTS]) {
  if (s.scaling != FOUROVERSIX || s.source == ON_CHIP) return;
  rotate<D>(s, r.signs, t, x);
  const Grid g = grid_of(s);
  const Group group = make_group(s.scaling, g.max, value(r.group_amax[0]));
  Gathering<Weighed> blocks(s.block_piece, r.blocks, t, r.four_less_six);
#pragma unroll 1
  for (int k = 0; k < SLOTS; k++) {
    Vector<D> v = picked<D>(x, k);
    int valid = t.valid(k);
#pragma unroll 1
    for (int i = 0; i < WIDTH; i++) {
      if (i < valid) {
        float amax = value(r.block_amax[r.blocks.at(t.row(k), t.col(k) + i)]);
        uint64_t index = t.index(k) + uint64_t(i);
        uint32_t high = s.stochastic ? rounding_high(index, r.seed) : 0;
        float size = D::widen(typename D::Storage(v.pick(i) & D::magnitude_mask));
        FourOverSix b = four_over_six(s, group, amax);
        blocks.sum.sum += four_less_six(size, g, b, s.stochastic, high, index, r.seed);
      }
      blocks.after_element(k, i);
    }
    blocks.after_vector(k);
  }
  blocks.after_all();
}

template <class D> FB_D void weigh(const Call &call) {
  Tile t(call.rows, call.cols, call.aligned, call.backwards);
  Vector<D> x[SLOTS];
  load<D>(call.x, t, true, x);
  weigh_tile<D>(spec<0>(), call.requests[0], t, x);
  if (spec_count() == 1) return;
  load<D>(call.x, t, true, x);
  weigh_tile<D>(spec<1>(), call.requests[1], t, x);
}

template <class D> FB_D void extent(const Call &call) {
  const Request &r = call.requests[0];
  Tile t(call.rows, call.cols, call.aligned, call.backwards);
  Gathering<Extent> parts(spec<0>().piece, r.parts, t, Extent::Target{r.block_amax, r.group_amax});
  Vector<D> x[SLOTS];
  load<D>(call.x, t, true, x);
#pragma unroll
  for (int k = 0; k < SLOTS; k++) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      parts.sum.take(bits(D::widen(x[k].get(i))) & MAGNITUDE);
      parts.after_element(k, i);
    }
    parts.after_vector(k);
  }
  parts.after_all();
}

}  // namespace fb

#ifndef FB_SIMT
extern "C" __global__ void __launch_bounds__(fb::shape().threads, fb::least_ctas())
    run(const __grid_constant__ fb::Call call) {
  fb::FB_KERNEL<fb::FB_DTYPE>(call);
}
#endif
