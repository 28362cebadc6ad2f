// The constants that a kernel is compiled for and its arguments. variants.py and device.py mirror these structures
// field by field.
//
// A kernel is compiled for one Variant, the shape of its tiles and one or two quantizers. All of it is constant, so
// that the compiler omits what a variant does not use. In tests the same sources run on the CPU, with variants as data
// (FB_SIMT, tests/kernels/backends/simt/), so constants are values here and conditions are plain ifs.
#pragma once
#include "element.h"
#include "hadamard.h"
#include "ordinary.h"

#ifdef FB_SIMT
#define FB_D inline
#else
#define FB_D __device__ __forceinline__
#endif

namespace fb {

// ON_CHIP: blocks fit in tiles, and their amaxes are computed on the way. LOOKUP: a first pass has computed them.
enum Source { ON_CHIP = 0, LOOKUP = 1 };

// The position of parts of the matrix (blocks, or a partition) relative to the work of threads: the largest piece that
// is always inside one part decides how often a thread must hand in what it has accumulated.
enum Piece { TILES = 0, PATCHES = 1, VECTORS = 2, ELEMENTS = 3 };

struct Spec {
  GridWords grid;
  Scaling scaling;
  int32_t stochastic, group_by_row, hadamard, ragged, inverse, down,
      source;                      // ragged: some transforms are cut
  int32_t block_rows, block_cols;  // ON_CHIP: powers of two, as stored in the matrix
  int32_t stats, skips;
  int32_t encodes;             // the bits of a code; 0: output values
  int32_t piece, block_piece;  // for statistics and skip; LOOKUP: for the blocks
};

struct Parts {
  int32_t rows, cols, across;  // of one part; number of parts across
  int32_t lanes, groups;       // VECTORS, PATCHES: how many lanes along a row, and rows of lanes, share a part
  FB_D int64_t at(int row, int col) const { return int64_t(row / rows) * across + col / cols; }
};

// The location of codes. Eight codes take as many bytes as one has bits, and a row starts at a byte. If they are
// `aligned`, every eight start at a multiple of the widest word that divides these bytes.
struct Packed {
  uint8_t *bytes;
  uint32_t row_bytes, aligned;
  FB_D uint8_t *at(int row, int col, int width) const {
    return bytes + int64_t(row) * row_bytes + int64_t(col / 8) * width;
  }
};

struct Request {           // for one quantizer
  void *out;               // null: none
  int64_t *tally;          // with stats: seven per part
  uint32_t *part_amax;     // with stats: float32 bits per part
  const uint8_t *skip;     // null: none; parts to leave unchanged
  Packed codes;            // with encodes: codes of elements,
  void *scales;            // of blocks: float32 for amax, otherwise bytes,
  float *group_scales;     // and of groups (null: none)
  uint32_t *block_amax;    // LOOKUP: one per block, float32 bits
  uint32_t *group_amax;    // of each group's finite blocks, float32 bits
  int64_t *four_less_six;  // fouroversix: one per block
  uint64_t seed;
  Signs signs;
  Parts parts, blocks;  // for statistics and skip; LOOKUP: the blocks
  uint32_t nan_code, inf_code;
};

struct Call {
  const void *x;
  int32_t rows, cols;  // below 2^31 - 2^15, so that tiles may extend beyond
  int32_t backwards;   // last tile first, because a first pass left the end of the matrix in the cache
  int32_t aligned;     // every row of every matrix starts at a multiple of 16 bytes
  Request requests[2];
};

// The shape of a CTA's tile. Every thread holds eight slots of eight consecutive columns: eight rows below each other
// (its patch) with `lanes` threads side by side; or, with `along`, vectors of one row, `threads` apart.
struct Shape {
  int32_t threads, lanes, along;
};

#ifdef FB_SIMT
struct Variant {
  Shape shape;
  int32_t count;
  Spec specs[2];
};
inline Variant variant;
template <int I> inline Spec spec() { return variant.specs[I]; }
inline Shape shape() { return variant.shape; }
inline int spec_count() { return variant.count; }
#else
constexpr int COUNT = FB_COUNT;
template <int I> FB_D constexpr Spec spec() {
  constexpr Spec all[] = {FB_SPECS};
  return all[I < COUNT ? I : 0];
}
FB_D constexpr Shape shape() { return Shape{FB_SHAPE}; }
FB_D constexpr int spec_count() { return COUNT; }

// How many CTAs at least share a multiprocessor's registers: 512 threads' worth, except for the few variants that need
// more than 128 registers.
FB_D constexpr bool heavy(const Spec &s) {
  return (s.down && s.hadamard > (COUNT > 1 ? 0 : 16)) || (s.scaling.compares() && s.source == ON_CHIP) ||
         (s.ragged && s.stochastic) ||
         (s.scaling.kind != NONE && s.source == ON_CHIP && s.block_rows * s.block_cols < 4);
}
FB_D constexpr int least_ctas() {
  int threads = heavy(spec<0>()) || heavy(spec<1>()) ? 256 : 512;
  return threads > shape().threads ? threads / shape().threads : 1;
}
#endif

FB_D int group_index(const Spec &s, int block_row, int block_col) {
  return !s.group_by_row ? 0 : s.down ? block_col : block_row;
}

// The fast path is not compiled where no block can take it.
FB_D bool exact_only(const Spec &s) { return exact_only(s.scaling, s.grid.grid()); }

}  // namespace fb
