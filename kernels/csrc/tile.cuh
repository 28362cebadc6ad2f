// The distribution of a tile's elements among threads, the loads and stores of a tile, and the reduction of the values
// that threads have accumulated for a part of the matrix.
#pragma once
#include "spec.cuh"

namespace fb {

constexpr int SLOTS = 8, WIDTH = 8, WARP = 32, MAX_WARPS = 32;
constexpr uint32_t ALL = 0xffffffffu;

// Narrow two values to 16 bits each, and return them in one word, the first in the lower half. GPUs have an instruction
// that narrows both.
template <class D> FB_D uint32_t narrow_two(float first, float second) {
  return uint32_t(D::narrow(first)) | uint32_t(D::narrow(second)) << 16;
}
#ifdef __CUDA_ARCH__
template <> FB_D uint32_t narrow_two<Bf16>(float first, float second) {
  uint32_t two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
  return two;
}
template <> FB_D uint32_t narrow_two<Fp16>(float first, float second) {
  uint32_t two;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
  return two;
}
#endif

// Eight elements as stored in memory, in words of 32 bits, the size of registers.
template <class D> struct Vector {
  typedef typename D::Storage S;
  static constexpr int WORDS = int(WIDTH * sizeof(S) / 4), PER_WORD = WIDTH / WORDS;
  uint32_t w[WORDS];

  FB_D S get(int i) const { return PER_WORD == 1 ? S(w[i]) : S(w[i / PER_WORD] >> (16 * (i % PER_WORD))); }
  FB_D void set(int i, S s) {
    if (PER_WORD == 1) {
      w[i] = s;
    } else {
      int shift = 16 * (i % PER_WORD);
      w[i / PER_WORD] = (w[i / PER_WORD] & ~(0xffffu << shift)) | uint32_t(s) << shift;
    }
  }
  FB_D void set_two(int i, float first, float second) {  // narrows elements i and i + 1, where i is even
    if (PER_WORD == 1) {
      w[i] = uint32_t(D::narrow(first)), w[i + 1] = uint32_t(D::narrow(second));
    } else {
      w[i / 2] = narrow_two<D>(first, second);
    }
  }
  // Return element n, where n is unknown at compile time: all elements are tried, because registers have no addresses.
  FB_D S pick(int n) const {
    S s = 0;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) s = i == n ? get(i) : s;
    return s;
  }
  // Return a word with 1 at the position of each element of word j that is not zero; all elements are magnitudes.
  FB_D uint32_t nonzero(int j) const { return PER_WORD == 1 ? uint32_t(w[j] != 0) : __vminu2(w[j], 0x00010001u); }
};

struct Tile {
  int rows, cols, row0, col0;  // size of the matrix; position of this thread's first slot
  int thread, columns_apart, rows_apart;
  bool aligned;  // every row starts at a multiple of 16 bytes, so whole vectors can be loaded and stored at once

  FB_D Tile(int rows, int cols, bool aligned, bool backwards)
      : rows(rows), cols(cols), thread(int(threadIdx.x)), aligned(aligned) {
    Shape s = shape();
    int index = int(backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (s.along) {
      row0 = index, col0 = thread * WIDTH;
      columns_apart = s.threads * WIDTH, rows_apart = 0;
    } else {
      int across = (cols + s.lanes * WIDTH - 1) / (s.lanes * WIDTH), down = index / across;
      place(down, index - down * across);
    }
  }
  // The tile with this number in the CTA's strip.
  FB_D Tile(const Call &call, int number)
      : rows(call.rows), cols(call.cols), thread(int(threadIdx.x)), aligned(call.aligned) {
    place(number, int(blockIdx.x));
  }
  FB_D void place(int down, int across) {
    Shape s = shape();
    row0 = (down * (s.threads / s.lanes) + thread / s.lanes) * SLOTS;
    col0 = (across * s.lanes + thread % s.lanes) * WIDTH;
    columns_apart = 0, rows_apart = 1;
  }
  FB_D int row(int k) const { return row0 + k * rows_apart; }
  FB_D int col(int k) const { return col0 + k * columns_apart; }
  FB_D int valid(int k) const {  // the number of columns of slot k that are in the matrix
    int left = cols - col(k);
    return row(k) >= rows || left <= 0 ? 0 : left < WIDTH ? left : WIDTH;
  }
  FB_D bool all_whole() const {  // every slot is entirely inside the matrix or entirely beyond it
    return cols % WIDTH == 0;
  }
  FB_D bool whole() const {  // every slot of this thread is a whole vector, and can be loaded and stored at once
    return aligned && row(SLOTS - 1) < rows && col(SLOTS - 1) + WIDTH <= cols;
  }
  // The distance in bytes between this thread's slots in a matrix with elements of this size.
  FB_D int64_t step(int bytes) const { return int64_t(shape().along ? columns_apart : cols) * bytes; }
  FB_D uint64_t index(int k) const { return uint64_t(int64_t(row(k)) * cols + col(k)); }
};

// Load a tile. Elements beyond the matrix become zero, which affects no result. `again`: the tile will be read a second
// time, so caches should keep it.
template <class D> FB_D void load(const void *from, const Tile &t, bool again, Vector<D> (&x)[SLOTS]) {
  typedef typename D::Storage S;
  if (t.whole()) {  // one branch for all slots
    const char *first = (const char *)((const S *)from + t.index(0));
#pragma unroll
    for (int k = 0; k < SLOTS; k++) {
      const uint4 *at = (const uint4 *)(first + k * t.step(sizeof(S)));
#pragma unroll
      for (int i = 0; i < Vector<D>::WORDS; i += 4) {
        uint4 q = again ? __ldca(at + i / 4) : __ldcs(at + i / 4);
        x[k].w[i] = q.x, x[k].w[i + 1] = q.y, x[k].w[i + 2] = q.z, x[k].w[i + 3] = q.w;
      }
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < SLOTS; k++) {
    x[k] = Vector<D>{};
    if (t.aligned && t.valid(k) == WIDTH) {
      const uint4 *at = (const uint4 *)((const S *)from + t.index(k));
#pragma unroll
      for (int i = 0; i < Vector<D>::WORDS; i += 4) {
        uint4 q = again ? __ldca(at + i / 4) : __ldcs(at + i / 4);
        x[k].w[i] = q.x, x[k].w[i + 1] = q.y, x[k].w[i + 2] = q.z, x[k].w[i + 3] = q.w;
      }
    }
  }
  if (t.aligned && t.all_whole()) return;
#pragma unroll
  for (int k = 0; k < SLOTS; k++) {
    int valid = t.aligned && t.valid(k) == WIDTH ? 0 : t.valid(k);
    const S *at = (const S *)from + t.index(k);
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (i < valid) x[k].set(i, at[i]);
  }
}
// Store the slots whose bits in `wanted` are set.
template <class D> FB_D void store(void *to, const Tile &t, const Vector<D> (&x)[SLOTS], uint32_t wanted) {
  typedef typename D::Storage S;
  if (t.whole() && wanted == (1u << SLOTS) - 1) {
    char *first = (char *)((S *)to + t.index(0));
#pragma unroll
    for (int k = 0; k < SLOTS; k++) {
      uint4 *at = (uint4 *)(first + k * t.step(sizeof(S)));
#pragma unroll
      for (int i = 0; i < Vector<D>::WORDS; i += 4)
        __stcs(at + i / 4, uint4{x[k].w[i], x[k].w[i + 1], x[k].w[i + 2], x[k].w[i + 3]});
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
    if (t.aligned && t.valid(k) == WIDTH && (wanted >> k & 1)) {
      uint4 *at = (uint4 *)((S *)to + t.index(k));
#pragma unroll
      for (int i = 0; i < Vector<D>::WORDS; i += 4)
        __stcs(at + i / 4, uint4{x[k].w[i], x[k].w[i + 1], x[k].w[i + 2], x[k].w[i + 3]});
    }
  if (t.aligned && t.all_whole()) return;
#pragma unroll
  for (int k = 0; k < SLOTS; k++) {
    int valid = (t.aligned && t.valid(k) == WIDTH) || !(wanted >> k & 1) ? 0 : t.valid(k);
    S *at = (S *)to + t.index(k);
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (i < valid) at[i] = x[k].get(i);
  }
}

FB_D uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The division of a thread's patch (eight slots of eight columns) into parts of `rows` slots and `cols` columns, each
// of which lies in one block. The sides of blocks are powers of two, and every block lies in one tile.
struct Split {
  int rows, cols;
  FB_D explicit Split(const Spec &s)
      : rows(shape().along && s.scaling.kind != NONE ? SLOTS
             : s.block_rows < SLOTS                  ? s.block_rows
                                                     : SLOTS),
        cols(shape().along && s.scaling.kind != NONE ? WIDTH
             : s.block_cols < WIDTH                  ? s.block_cols
                                                     : WIDTH) {}
  FB_D int row(int k) const { return k / rows * rows; }  // the first slot of the part that contains slot k
  FB_D int col(int i) const { return i / cols * cols; }
  FB_D bool starts(int k, int i) const { return k % rows == 0 && i % cols == 0; }
};

// Compute the amaxes, as storage bits, of the blocks that contain this thread's elements: amax[k][i] is the amax of the
// block of the part that starts at slot k and column i. All threads that share a block get the block's amax.
template <class D>
FB_D void block_amaxes(const Spec &s, const Tile &t, const Vector<D> (&x)[SLOTS], uint32_t (&amax)[SLOTS][WIDTH]) {
  const Split split(s);
  const Shape sh = shape();
  if (sizeof(typename D::Storage) == 2 && split.rows == SLOTS && split.cols == WIDTH) {  // two elements at once
    uint32_t top = 0;
#pragma unroll
    for (int k = 0; k < SLOTS; k++)
#pragma unroll
      for (int i = 0; i < Vector<D>::WORDS; i++) top = __vmaxu2(top, x[k].w[i] & 0x7fff7fffu);
    amax[0][0] = larger(top & 0xffffu, top >> 16);
  } else {
#pragma unroll
    for (int k = 0; k < SLOTS; k++)
#pragma unroll
      for (int i = 0; i < WIDTH; i++) {
        if (split.starts(k, i)) amax[k][i] = 0;
        uint32_t &m = amax[split.row(k)][split.col(i)];
        m = larger(m, uint32_t(x[k].get(i) & D::magnitude_mask));
      }
  }
  if (s.scaling.kind == NONE) return;

  int across = sh.along ? sh.threads : s.block_cols / WIDTH;  // number of threads that share a block across
  int below = sh.along ? 1 : s.block_rows / SLOTS;            // and down
  int rows_in_warp = sh.along ? 1 : WARP / sh.lanes;
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (split.starts(k, i)) {
#pragma unroll
        for (int d = 1; d < WARP; d *= 2)
          if (d < across) amax[k][i] = larger(amax[k][i], __shfl_xor_sync(ALL, amax[k][i], d));
#pragma unroll
        for (int d = 1; d < WARP; d *= 2)
          if (d < below && d < rows_in_warp)
            amax[k][i] = larger(amax[k][i], __shfl_xor_sync(ALL, amax[k][i], d * sh.lanes));
      }

  if (across <= WARP && below <= rows_in_warp) return;
  // The most blocks in a tile whose blocks are taller than a warp's rows, or extend beyond a warp.
  constexpr int ROOM = 512;
  __shared__ uint32_t shared[ROOM];
  int threads = sh.threads, tall = sh.along ? 1 : s.block_rows, tile_cols = sh.along ? WIDTH : sh.lanes * WIDTH;
  int wide = sh.along ? WIDTH : s.block_cols, blocks_across = tile_cols / wide;
  int first_row = sh.along ? 0 : t.thread / sh.lanes * SLOTS, first_col = sh.along ? 0 : t.thread % sh.lanes * WIDTH;
  for (int b = t.thread; b < ROOM; b += threads) shared[b] = 0;
  __syncthreads();
  // Of the lanes that share a block, which all have its amax within the warp, only one writes it to shared memory.
  const int beside = across > 1 ? across : 1, beneath = below < 1 ? 1 : below < rows_in_warp ? below : rows_in_warp;
  const int repeated = sh.along ? WARP - 1 : (beside - 1) | (beneath - 1) * sh.lanes;  // the bits of lanes that differ
  if (!(t.thread & repeated)) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (split.starts(0, i)) atomicMax(&shared[first_row / tall * blocks_across + (first_col + i) / wide], amax[0][i]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < WIDTH; i++)
    if (split.starts(0, i)) amax[0][i] = shared[first_row / tall * blocks_across + (first_col + i) / wide];
  __syncthreads();  // before the shared memory is written again
}

// Accumulates values of type A for the parts of a matrix, combines them among the threads that share a part, and adds
// them to the results in memory (`hand_in`). A has join(A), shuffled(distance) and hand_in(target, part).
template <class A> struct Gathering {
  const int piece;  // a Piece; a constant at compile time
  const Parts &parts;
  const Tile &t;
  typename A::Target target;
  A sum;

  FB_D Gathering(int piece, const Parts &parts, const Tile &t, typename A::Target target)
      : piece(piece), parts(parts), t(t), target(target), sum{} {}

  FB_D void hand_in(bool inside, int row, int col) {
    if (inside) sum.hand_in(target, parts.at(row, col));
    sum = A{};
  }
  FB_D void join(int lanes, int step) {
#pragma unroll
    for (int d = 1; d < WARP; d *= 2)
      if (d < lanes) sum.join(sum.shuffled(d * step));
  }
  FB_D void after_element(int k, int i) {
    if (piece == ELEMENTS) hand_in(i < t.valid(k), t.row(k), t.col(k) + i);
  }
  FB_D void after_vector(int k) {  // called by all threads of a warp together
    if (piece != VECTORS) return;
    join(parts.lanes, 1);
    hand_in(t.valid(k) > 0 && t.thread % parts.lanes == 0, t.row(k), t.col(k));
  }
  FB_D void after_all() {  // called by all threads together
    int lanes = shape().along ? WARP : shape().lanes;
    if (piece == PATCHES) {
      join(parts.lanes, 1);
      join(parts.groups, lanes);
      hand_in(t.valid(0) > 0 && t.thread % lanes % parts.lanes == 0 && t.thread / lanes % parts.groups == 0, t.row0,
              t.col0);
    } else if (piece == TILES) {
      __shared__ A warps[MAX_WARPS];
      join(WARP, 1);
      if (t.thread % WARP == 0) warps[t.thread / WARP] = sum;
      __syncthreads();
      if (t.thread == 0) {
        for (int i = 1; i < shape().threads / WARP; i++) sum.join(warps[i]);
        hand_in(true, t.row0, t.col0);
      }
      __syncthreads();
    }
  }
};

}  // namespace fb
