// The work of one quantizer in the passes over a matrix (walk.h). plan_amaxes.h, plan_scales.h and plan_rows.h define
// the steps.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>
#include "block_scales.h"
#include "codes.h"
#include "request.h"
#include "rotation.h"

namespace fb {

struct Tile {  // rows [r0, r1) and columns [c0, c1)
  int64_t r0, r1, c0, c1;
};

// One of the two candidate scales that Four Over Six compares, for each block of a row of blocks.
struct Candidate {
  std::vector<float> encode, decode;

  void compute(const Quant &q, const uint32_t *amax, int64_t n, const float *group_encode, const float *group_decode,
               float expansion) {
    encode.resize(size_t(n)), decode.resize(size_t(n));
    float *__restrict to_encode = encode.data(), *__restrict to_decode = decode.data();
    Scaling s = q.scaling;
    s.kind = TWO_LEVEL;
    for (int64_t i = 0; i < n; i++) {
      const Scale one = make_scale(s, q.grid.max, value(amax[i]), Group{group_encode[i], group_decode[i]}, expansion);
      to_encode[i] = one.encode, to_decode[i] = one.decode;
    }
  }
};

template <class D> struct Scratch {  // one per thread
  std::vector<Cell<D>> rotated, maxima;
  std::vector<uint32_t> amax, code, care, squares, products;
  std::vector<float> block_encode, block_decode, block_outer, encode, decode, outer;
  std::vector<float> group_encode, group_decode;  // the second-level value of each block's group
  Candidate six, four;
  std::vector<float> columns[7];        // for weigh_run, per column: the arrays of `Candidates`
  std::vector<float> amaxes, inverses;  // of the blocks that `weigh` compares
  std::vector<int64_t> weights, sums;   // four_less_six of each element of a row, and of each block of a row of blocks;
                                        // in `sums` find_scales needs a number below 0 if the block prefers 4
};

template <class D> struct Plan {
  const Request &request;
  const Quant &q;
  const Cell<D> *x;
  int64_t rows, cols, R, C, block_count_rows, block_count_cols;  // R x C: the size of a block; numbers of blocks
  bool lookup = false;  // a first pass computes the amaxes of blocks, for example because blocks are larger than tiles
  bool apart = false;   // Four Over Six: an additional pass compares the candidates of blocks larger than tiles
  bool grouped;         // blocks share a second-level value: a first pass computes the amaxes of groups
  bool around;          // the output bypasses the caches
  bool staged;          // the first pass writes the rotated matrix to the output, which the second pass reads
  std::vector<uint32_t> block_amax, group_amax;
  std::vector<int64_t> four_less_six;  // if `apart`: the sum of `four_less_six` of each block
  Rotation<D> rotation;

  Plan(const Request &r, const Cell<D> *x, int64_t rows, int64_t cols)
      : request(r),
        q(r.quant),
        x(x),
        rows(rows),
        cols(cols),
        R(q.scaling.kind == NONE ? 1 : q.block_rows),
        C(q.scaling.kind == NONE ? PIECE : q.block_cols),
        block_count_rows((rows + R - 1) / R),
        block_count_cols((cols + C - 1) / C),
        grouped(q.scaling.grouped()),
        around(exceeds_caches<D>(rows, cols)),
        rotation(q.hadamard, q.signs) {}
  bool needs_first_walk() const { return lookup || grouped; }
  bool weighs() const { return q.scaling.compares(); }
  void settle() { staged = q.hadamard && needs_first_walk() && request.out && !request.skip; }
  int64_t groups_across() const { return q.down ? block_count_cols : (block_count_cols + q.group - 1) / q.group; }
  int64_t group_count() const {
    return !q.group ? 1 : (q.down ? (block_count_rows + q.group - 1) / q.group : block_count_rows) * groups_across();
  }
  int64_t group_of(int64_t block_row, int64_t block_col) const {
    if (!q.group) return 0;
    return (q.down ? block_row / q.group : block_row) * groups_across() + (q.down ? block_col : block_col / q.group);
  }
  bool in_one_group(const Tile &t) const {  // true if the blocks of a row of blocks in the tile share a group
    return !q.group || (!q.down && t.c0 / C / q.group == (t.c1 - 1) / C / q.group);
  }
  bool groups_by_column() const { return q.group && q.down; }  // neighbouring blocks of a row have different groups
  void allocate() {
    if (lookup) block_amax.assign(size_t(block_count_rows * block_count_cols), 0);
    if (grouped) group_amax.assign(size_t(group_count()), 0);
    if (apart) four_less_six.assign(size_t(block_count_rows * block_count_cols), 0);
  }

  bool transposes() const { return request.operand && q.down; }
  const Cell<D> *second_source() const { return staged ? (const Cell<D> *)request.out : x; }
  Scale scale_at(const Scratch<D> &s, size_t b) const {
    return Scale{s.block_encode[b], s.block_decode[b], s.block_outer[b], s.code[b]};
  }
  bool all_ordinary(const Scratch<D> &s, int64_t first, int64_t last) const {
    static_assert(ORDINARY == 0, "the bits of other kinds are found by `or`, in vectors");
    uint32_t others = 0;
    for (int64_t b = first; b <= last; b++) others |= s.care[size_t(b)];
    return !others;
  }
  Layout layout() const {
    bool whole_groups =
        C % GROUP == 0 && (!request.tally_cols || request.tally_cols >= cols || request.tally_cols % GROUP == 0);
    if (C >= PIECE) return UNIFORM;
    return groups_by_column() && q.scaling.two_levels() ? EACH_COLUMN : whole_groups ? BY_SIXTEEN : BY_COLUMN;
  }
  // Return the number of columns that one call of `row` or `code_row` processes: whole blocks if scales are expanded to
  // columns, and codes that fill whole bytes if codes are packed.
  int64_t columns_at_once(const Tile &t) const {
    if (!request.codes) return layout() == UNIFORM ? t.c1 - t.c0 : CHUNK / C * C;
    const int64_t step = layout() == UNIFORM ? 8 : std::lcm(C, int64_t(8));
    return CHUNK / step * step;
  }

  // plan_amaxes.h
  const Cell<D> *source(const Tile &t, Scratch<D> &s, int64_t *stride, bool second) const;
  void amaxes(const Cell<D> *from, int64_t stride, int64_t height, int64_t c0, int64_t c1, Scratch<D> &s) const;
  void first_walk(const Tile &t, Scratch<D> &s);
  void after_first_walk();
  void note_amax(const Cell<D> *from, int64_t stride, int64_t height, int64_t tally_row, const Tile &t,
                 Scratch<D> &s) const;

  // plan_scales.h
  void weigh(const Cell<D> *from, int64_t stride, int64_t r, int64_t end, const uint32_t *amax, const Tile &t,
             Scratch<D> &s) const;
  void weigh_parts(const Tile &t, Scratch<D> &s);
  template <bool STOCHASTIC> void weigh_groups(const Cell<D> *x, int64_t r, const Tile &t, Scratch<D> &s) const;
  template <bool STOCHASTIC> void weigh_columns(const Cell<D> *x, int64_t r, const Tile &t, Scratch<D> &s) const;
  void spread(const float *blocks, int64_t c0, int64_t c1, float *to) const;
  void add_blocks(const int64_t *from, int64_t c0, int64_t c1, int64_t *sums) const;
  template <class GroupOf>
  void find_scales_of(const uint32_t *amax, int64_t n, const int64_t *less, const Bounds &ordinary,
                      const BlockScales &to, GroupOf group) const;
  void find_groups(int64_t block_row, int64_t first, int64_t count, Scratch<D> &s) const;
  void correct(const Cell<D> *from, int64_t stride, int64_t height, int64_t block_row, const Tile &t,
               Scratch<D> &s) const;
  void find_scales(const Cell<D> *from, int64_t stride, int64_t height, int64_t block_row, const Tile &t,
                   Scratch<D> &s) const;
  void store_scales(int64_t block_row, const Tile &t, const Scratch<D> &s) const;
  void store_operand_scale(int64_t block_row, int64_t block_col, uint32_t code, uint32_t decode) const;
  void spread_out(int64_t c0, int64_t c1, int64_t first, Scratch<D> &s) const;

  // plan_rows.h
  void carefully(const Cell<D> *from, int64_t r, int64_t c, int n, int64_t first_block, const Scratch<D> &s,
                 Cell<D> *to, uint16_t *codes, Tally *tally) const;
  template <Layout LAYOUT, bool WIDE>
  void settle(const Cell<D> *from, int64_t r, int64_t c, int n, int64_t first_block, const Scratch<D> &s,
              const float *encode, const uint16_t *high, Cell<D> *to) const;
  template <bool DIVIDE, bool STOCHASTIC, bool STATS, Layout LAYOUT, bool WIDE>
  void row(const Cell<D> *from, int64_t r, int64_t c0, int64_t c1, const Tile &t, const Scratch<D> &s, bool all_plain,
           const Cell<D> *fetch, Tally *tallies) const;
  template <bool STOCHASTIC, Layout LAYOUT, bool WIDE>
  void code_row(const Cell<D> *from, int64_t r, int64_t c0, int64_t c1, const Tile &t, const Scratch<D> &s,
                bool all_plain, const Cell<D> *fetch, uint16_t *codes) const;
  void store_codes(const uint16_t *codes, int64_t r, int64_t n, int64_t c0, int64_t c1) const;
  const Cell<D> *fetch_for(int64_t r, const Tile &t, const Tile &next) const;
  void second_walk(const Tile &t, const Tile &next, Scratch<D> &s) const;

  typedef void (Plan::*Row)(const Cell<D> *, int64_t, int64_t, int64_t, const Tile &, const Scratch<D> &, bool,
                            const Cell<D> *, Tally *) const;
  template <bool DIVIDE, bool STOCHASTIC, bool STATS> Row row_for() const {
    if (q.grid.wide) return &Plan::row<false, STOCHASTIC, STATS, UNIFORM, true>;
    switch (layout()) {
      case UNIFORM:
        return &Plan::row<DIVIDE, STOCHASTIC, STATS, UNIFORM, false>;
      case BY_SIXTEEN:
        return &Plan::row<DIVIDE, STOCHASTIC, STATS, BY_SIXTEEN, false>;
      case EACH_COLUMN:
        return &Plan::row<false, STOCHASTIC, STATS, EACH_COLUMN, false>;
      default:
        return &Plan::row<DIVIDE, STOCHASTIC, STATS, BY_COLUMN, false>;
    }
  }
  template <bool DIVIDE> Row row_for() const {
    if (q.stochastic) return request.tally ? row_for<DIVIDE, true, true>() : row_for<DIVIDE, true, false>();
    return request.tally ? row_for<DIVIDE, false, true>() : row_for<DIVIDE, false, false>();
  }
  Row chosen_row() const { return q.scaling.divides() ? row_for<true>() : row_for<false>(); }

  typedef void (Plan::*CodeRow)(const Cell<D> *, int64_t, int64_t, int64_t, const Tile &, const Scratch<D> &, bool,
                                const Cell<D> *, uint16_t *) const;
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
};

}  // namespace fb
