// The constants for which a kernel is compiled, and the arguments of a kernel. variants.py (Spec), tiles.py (Shape,
// Parts) and calls.py mirror these structures field by field.
//
// A kernel is compiled for one Variant: the shape of its tiles, and one or two quantizers. All of these are constants,
// so the compiler omits code that a variant does not use. In tests the same sources run on the CPU (FB_SIMT,
// tests/kernels/backends/gpu/simt/), mostly with variants as run-time data; for this reason the code tests the
// constants with ordinary ifs.
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

// The source of the amaxes of blocks. ON_CHIP: blocks fit in tiles, so the same pass computes them. LOOKUP: a first
// pass has computed them. STRIP: the CTA has computed them for the columns of its strip (strip.cuh).
enum Source { ON_CHIP = 0, LOOKUP = 1, STRIP = 2 };

// The largest piece of a tile that always lies within one part of the matrix (a block, or a part for which statistics
// are counted). A thread must add the values that it has accumulated to the results after each such piece. COLUMNS is
// only for blocks that are one column wide: each column of a tile lies within one block.
enum Piece { TILES = 0, PATCHES = 1, VECTORS = 2, ELEMENTS = 3, COLUMNS = 4 };

struct Spec {
  GridWords grid;
  Scaling scaling;
  int32_t stochastic, group, hadamard, ragged, inverse, down,
      source;                      // group: as in request.h; ragged: the last transform of a line is shorter
  int32_t block_rows, block_cols;  // ON_CHIP: powers of two; rows and columns as in memory
  int32_t stats, skips;            // 1: statistics are counted; 1: `skip` is given
  int32_t encodes;                 // the number of bits of a code; 0: the output is values
  int32_t operand;                 // 1: codes and scales are those of an operand (packing.py), transposed if `down`
  int32_t piece, block_piece;      // the Piece for the parts of statistics and skip; the Piece for blocks (not ON_CHIP)
  int32_t replayed;                // what the kernel of a CUDA graph reads from memory: seed (1), signs (2), both (3)
};

struct Parts {
  int32_t rows, cols, across;  // rows and columns of one part; number of parts across
  int32_t lanes, groups;  // VECTORS, PATCHES: the number of lanes along a row, and of rows of lanes, that share a part
  FB_D int64_t at(int row, int col) const { return int64_t(row / rows) * across + col / cols; }
};

// The location of packed codes. Eight codes of b bits fill b bytes, and every row starts at a byte. `aligned`: the
// address of every group of eight codes is a multiple of the largest power of two that divides b.
struct Packed {
  uint8_t *bytes;
  uint32_t row_bytes, aligned;
  FB_D uint8_t *at(int row, int col, int width) const {
    return bytes + int64_t(row) * row_bytes + int64_t(col / 8) * width;
  }
};

struct Request {           // for one quantizer
  void *out;               // null: none
  int64_t *tally;          // with stats: seven statistics per part
  uint32_t *part_amax;     // with stats: float32 bits per part
  const uint8_t *skip;     // null: none; 1 for each part to leave unchanged
  Packed codes;            // with encodes: the codes of elements
  void *scales;            // with encodes: one per block; float32 for amax, otherwise bytes
  float *group_scales;     // with encodes: one per group (null: none)
  uint32_t *block_amax;    // LOOKUP: one per block, float32 bits
  uint32_t *group_amax;    // one per group, the largest amax of its finite blocks; float32 bits
  int64_t *four_less_six;  // Four Over Six: the sum of `four_less_six` of each block
  uint64_t seed;
  const uint64_t *seed_offset;   // with replayed & 1: in device memory, because replays of a CUDA graph differ
  const uint32_t *sign_changes;  // with replayed & 2: the bits by which the signs of a replay differ from `signs`
  Signs signs;
  Parts parts, blocks;  // for statistics and skip; not ON_CHIP: the blocks
  uint32_t nan_code, inf_code;
  int32_t line_stride, block_stride;  // with operand: the places of scales

  FB_D uint64_t key(const Spec &s) const { return s.replayed & 1 ? seed + *seed_offset : seed; }
  FB_D uint32_t negative(const Spec &s, int word) const {
    return s.replayed & 2 ? signs.negative[word] ^ sign_changes[word] : signs.negative[word];
  }
};

struct Call {
  const void *x;
  int32_t rows, cols;  // below 2^31 - 2^15, so that tiles may extend beyond
  int32_t backwards;   // 1: process the last tile first, because the first pass left the end of the matrix in the cache
  int32_t aligned;     // every row of every matrix starts at a multiple of 16 bytes
  int32_t kept;        // the number of tiles of a strip that are kept in shared memory
  int32_t unused;
  Request requests[2];
};

// The shape of a CTA's tile. Every thread has eight slots, each with eight consecutive columns of a row. The slots of a
// thread are below each other (its patch), with `lanes` threads side by side; or, with `along`, they are in one row,
// and the slots of the other threads lie between them.
struct Shape {
  int32_t threads, lanes, along;
};

#if defined(FB_SIMT) && !defined(FB_SPECS)
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

// The number of CTAs that must fit on a multiprocessor at the same time: together 512 threads, or 256 threads for the
// few variants that need more than 128 registers per thread to quantize.
FB_D constexpr bool heavy(const Spec &s) {
  return (s.down && s.hadamard > (COUNT > 1 ? 0 : 16)) || (s.scaling.compares() && s.source == ON_CHIP) ||
         (s.ragged && s.stochastic) ||
         (s.scaling.kind != NONE && s.source == ON_CHIP && s.block_rows * s.block_cols < 4);
}
FB_D constexpr int least_ctas(bool quantizes = true) {
  int threads = quantizes && (heavy(spec<0>()) || heavy(spec<1>())) ? 256 : 512;
  return threads > shape().threads ? threads / shape().threads : 1;
}
#endif

// True if the codes of a matrix's columns lie one after the other in memory.
FB_D bool transposes(const Spec &s) { return s.operand && s.down; }

// across: the number of blocks across.
FB_D int group_index(const Spec &s, int block_row, int block_col, int across) {
  if (!s.group) return 0;
  return s.down ? block_row / s.group * across + block_col
                : block_row * ((across - 1) / s.group + 1) + block_col / s.group;
}

// True if no block can take the fast path, so that the fast path is not compiled.
FB_D bool exact_only(const Spec &s) { return exact_only(s.scaling, s.grid.grid()); }

}  // namespace fb
