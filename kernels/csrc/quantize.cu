// The quantization of a matrix on a GPU, with a tile per CTA. The kernels are:
//
//   quantize        loads, rotates, computes amaxes and scales, rounds, counts and stores, for one or two quantizers
//                   with one read of the matrix; if blocks fit in tiles and share no value, this is the only pass
//   quantize_strip  does the same for blocks that are whole columns, higher than tiles: a CTA processes several tiles
//   measure         the first pass otherwise: computes the amaxes of blocks larger than tiles, or of groups of blocks
//   weigh           a second pass for Four Over Six with large blocks: compares the errors of its two scales
//   extent          computes the largest and the smallest non-zero magnitude of each part of a matrix
//
// All maxima and sums are of integers, so no bit depends on the order of threads.
#include "elements.cuh"

namespace fb {

// Quantize a tile that has been rotated. ON_CHIP: `amax` contains the values from which `known` rebuilds the blocks.
template <class D>
FB_D void convert_tile(const Spec &s, const Request &r, const Tile &t, Vector<D> (&x)[SLOTS],
                       const uint32_t (&amax)[SLOTS][WIDTH]) {
  const Split split(s);
  Gathering<Counts> gathering(s.piece, r.parts, t, Counts::Target{r.tally, r.part_amax});
  bool by_element = s.piece == ELEMENTS && (s.stats || s.skips);
  uint32_t careful = 0, ready = 0;  // one bit per slot
  Block blocks[WIDTH] = {};         // may stay empty for slots beyond the matrix
  Codes kept[SLOTS] = {};           // the codes of each slot if they are transposed
#pragma unroll
  for (int k = 0; k < SLOTS; k++) {
    bool inside = t.valid(k) > 0, plain = true;
    if (s.source == LOOKUP) {
      plain = s.block_piece != ELEMENTS;
      if (s.block_piece == COLUMNS) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
          if (inside && k == 0) {
            const int col = t.col(0) + i < t.cols ? t.col(0) + i : t.cols - 1;
            blocks[i] = looked_up<D>(s, r, t.row(0), col);
            if (s.encodes && t.valid(0) > i) store_scale(s, r, blocks[i], t.row(0), col);
          }
      } else if (inside && plain && (k == 0 || s.block_piece == VECTORS)) {
        blocks[0] = looked_up<D>(s, r, t.row(k), t.col(k));
        if (s.encodes) store_scale(s, r, blocks[0], t.row(k), t.col(k));
      }
    } else if (s.source == STRIP) {
#pragma unroll
      for (int i = 0; i < WIDTH; i++)
        if (k == 0) blocks[i] = strip_blocks()[strip_column(t) + i];
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; i++)
        if (split.starts(k, i)) {
          // A slot beyond the matrix reads the value of the last group, so that the index stays within the array; the
          // value has no effect.
          const int row = t.row(k) < t.rows ? t.row(k) : t.rows - 1,
                    col = t.col(k) + i < t.cols ? t.col(k) + i : t.cols - 1;
          blocks[i] = known<D>(s, r, amax[k][i], row, col);
          if (s.operand && s.scaling.kind != FLOAT)
            store_line_scales(s, r, blocks[i], t, t.row(k), t.col(k) + i, split.rows, split.cols);
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
        done = s.grid.wide
                   ? quickly<D, true>(s, x[k], blocks, split, t.index(k), r.key(s), &y, &codes, &gathering.sum)
                   : quickly<D, false>(s, x[k], blocks, split, t.index(k), r.key(s), &y, &codes, &gathering.sum);
        if (done && transposes(s)) {
          kept[k] = codes;
        } else if (done && s.encodes) {
          store_codes(r.codes, t.row(k), t.col(k), codes, t.valid(k), stored_bits(s.encodes));
        }
        if (done && !s.encodes) x[k] = y, ready |= 1u << k;
      }
      if (!done) careful |= 1u << k;
    }
    if (s.stats) gathering.after_vector(k);
  }
  if (r.out) store<D>(r.out, t, x, ready);
  if (careful) Careful<D>{s, r, t, x, amax, gathering, kept}.all(careful);
  if (transposes(s)) store_transposed(r.codes, t, kept, stored_bits(s.encodes));
  if (s.stats) gathering.after_all();
}

template <class D> FB_D void quantize_tile(const Spec &s, const Request &r, const Tile &t, Vector<D> (&x)[SLOTS]) {
  rotate<D>(s, r, t, x);
  uint32_t amax[SLOTS][WIDTH];
  if (s.source == ON_CHIP) block_amaxes<D>(s, t, x, amax);
  if (s.scaling.corrects()) correct_blocks<D>(s, r, t, x, amax);
  if (s.scaling.compares() && s.source == ON_CHIP) choose_fours<D>(s, r, t, x, amax);
  convert_tile<D>(s, r, t, x, amax);
}

// True if the whole matrix is one part and this part is skipped, so that there is nothing to do.
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
    load<D>(call.x, t, false,
            x);  // read again from the cache, because keeping both copies would need too many registers
    quantize_tile<D>(spec<1>(), call.requests[1], t, x);
  }
}

template <class D> FB_D void quantize_strip(const Call &call) {
  const Spec s = spec<0>();
  const Request &r = call.requests[0];
  if (all_skipped(call, r)) return;
  const int last = tiles_in_strip(call) - 1;
  Vector<D> x[SLOTS];
  ColumnTops<D> tops{};
#pragma unroll 1
  for (int n = 0; n <= last; n++) {
    const Tile t(call, n);
    load_rotated<D>(call, t, n >= call.kept && n < last, x);
    tops.take(x);
    if (n < call.kept) keep<D>(t, n, x);
  }
  make_strip_blocks<D>(s, r, Tile(call, 0), tops);
  const uint32_t none[SLOTS][WIDTH] = {};
#pragma unroll 1
  for (int n = last; n >= 0; n--) {
    const Tile t(call, n);
    if (n < call.kept) {
      recall<D>(t, n, x);
    } else if (n < last) {
      load_rotated<D>(call, t, false, x);
    }
    convert_tile<D>(s, r, t, x, none);
  }
}

// Compute the largest magnitude of each column of a tile: over a thread's rows in registers, over a warp by shuffles,
// over the tile in shared memory. Then one thread per column raises the amax of the column's block to it. A second call
// needs no barrier before it: a thread that clears a column's maximum is the one that read it last.
template <class D> FB_D void measure_columns(const Request &r, const Tile &t, const Vector<D> (&x)[SLOTS]) {
  __shared__ uint32_t tops[2 * SLOTS * WIDTH];  // the columns of the widest tile
  const int lanes = shape().lanes, tile_cols = lanes * WIDTH, own = t.thread % lanes * WIDTH;
  for (int c = t.thread; c < tile_cols; c += shape().threads) tops[c] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    uint32_t top = 0;
#pragma unroll
    for (int k = 0; k < SLOTS; k++) top = larger(top, uint32_t(x[k].get(i) & D::magnitude_mask));
#pragma unroll
    for (int d = 1; d < WARP; d *= 2)
      if (d >= lanes) top = larger(top, __shfl_xor_sync(ALL, top, d));
    if (t.thread % WARP < lanes) atomicMax(&tops[own + i], top);
  }
  __syncthreads();
  const int first_row = t.row0 - t.thread / lanes * SLOTS, first_col = t.col0 - own;
  for (int c = t.thread; c < tile_cols; c += shape().threads)
    if (first_col + c < t.cols)
      atomicMax(&r.block_amax[r.blocks.at(first_row, first_col + c)], bits(D::widen(typename D::Storage(tops[c]))));
}

// Raise the amax of each group to the finite amaxes of its blocks; a group is a part of a row of blocks (or, if `down`,
// of a column), whose length is 2^n values or the whole row. The lanes of a warp that have elements of the same groups
// reduce the amaxes by shuffles. Then each of these lanes writes other groups, so that a warp needs one atomic
// operation per group, and one instruction writes one group per lane.
template <class D>
FB_D void measure_groups(const Spec &s, const Request &r, const Tile &t, const uint32_t (&amax)[SLOTS][WIDTH]) {
  const Split split(s);
  const int lanes = shape().along ? WARP : shape().lanes, lane = t.thread % lanes, line = t.thread % WARP / lanes;
  const int beside = s.down ? WARP / lanes : lanes, step = s.down ? lanes : 1;
  const int64_t length = int64_t(s.group) * (s.down ? s.block_rows : s.block_cols) / 8;  // of a group, in lanes
  const int peers = length < beside ? int(length) : beside, own = (s.down ? line : lane) % peers;
  uint32_t tops[8] = {};  // the amax of the group that starts at each slot (or, if `down`, column)
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (split.starts(k, i)) {
        uint32_t &top = tops[s.down ? i : k];
        top = larger(top, amax[k][i] < D::inf ? amax[k][i] : 0u);
      }
  const int part = s.down ? split.cols : split.rows;
#pragma unroll
  for (int n = 0; n < 8; n++)
    if (n % part == 0) {
#pragma unroll
      for (int d = 1; d < WARP; d *= 2)
        if (d < peers) tops[n] = larger(tops[n], __shfl_xor_sync(ALL, tops[n], d * step));
    }
  // If blocks are larger than a patch, neighbouring lanes have the same group; only the first of them writes it.
  const int repeated = s.down ? s.block_cols / WIDTH : s.block_rows / SLOTS;
  const bool first = (s.down ? lane : line) % (repeated > 1 ? repeated : 1) == 0;
#pragma unroll
  for (int from = 0; from < 8; from += peers * part) {
    const int n = from + own * part;
    uint32_t top = 0;
#pragma unroll
    for (int m = 0; m < 8; m++) top = m == n ? tops[m] : top;
    const int row = s.down ? t.row0 - own * SLOTS : t.row0 + n, col = s.down ? t.col0 + n : t.col0 - own * WIDTH;
    if (first && n < 8 && row < t.rows && col < t.cols)
      atomicMax(&r.group_amax[group_index(s, row / s.block_rows, col / s.block_cols, r.blocks.across)],
                bits(D::widen(typename D::Storage(top))));
  }
}

template <class D> FB_D void measure_tile(const Spec &s, const Request &r, const Tile &t, Vector<D> (&x)[SLOTS]) {
  if (s.source == ON_CHIP && !s.scaling.grouped()) return;
  rotate<D>(s, r, t, x);
  if (s.source == LOOKUP && s.block_piece == COLUMNS) {
    measure_columns<D>(r, t, x);
    return;
  }
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
  if (s.group) {
    measure_groups<D>(s, r, t, amax);
    return;
  }
  Maximum finite{0};
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (split.starts(k, i) && amax[k][i] < D::inf)
        finite.top = larger(finite.top, bits(D::widen(typename D::Storage(amax[k][i]))));
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
constexpr bool QUANTIZES = fb::FB_KERNEL<fb::FB_DTYPE> == fb::quantize<fb::FB_DTYPE> ||
                           fb::FB_KERNEL<fb::FB_DTYPE> == fb::quantize_strip<fb::FB_DTYPE>;
extern "C" __global__ void __launch_bounds__(fb::shape().threads, fb::least_ctas(QUANTIZES))
    run(const __grid_constant__ fb::Call call) {
  fb::FB_KERNEL<fb::FB_DTYPE>(call);
}
#endif
