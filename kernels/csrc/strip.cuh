// Strips: if blocks are whole columns that are higher than a tile, one CTA quantizes a strip, all rows of a few
// columns. The CTA reads the tiles of its strip from top to bottom, computes the maxima of the columns and the block of
// each column, and then quantizes the tiles from bottom to top. It has the last tile in registers and as many others as
// possible in shared memory. It reads the remaining tiles from global memory again; they may still be in the L2 cache.
//
// A row of a strip is one sector of 32 bytes. On sm_90 a CTA keeps 6144 rows in shared memory and 2048 in registers, so
// columns of up to 8192 rows are read once. For every further 2048 rows, 132 CTAs read 8.7 MB again. An L2 of 50 MB
// serves these reads for columns of up to 18,432 rows if it contains nothing else, and of up to 14,336 rows if 33 MB of
// it are available for them.
#pragma once
#include "blocks.cuh"
#include "rotate.cuh"

namespace fb {

constexpr int STRIP_COLUMNS = 2 * WIDTH;  // the largest number of columns of a strip

#ifdef FB_SIMT
inline uint4 *dynamic_shared() { return (uint4 *)simt::dynamic_shared(); }
#else
FB_D uint4 *dynamic_shared() {
  extern __shared__ uint4 memory[];
  return memory;
}
#endif

// The blocks of a strip's columns, in shared memory.
FB_D Block *strip_blocks() {
  __shared__ Block blocks[STRIP_COLUMNS];
  return blocks;
}
FB_D int strip_column(const Tile &t) { return t.thread % shape().lanes * WIDTH; }  // this thread's first column

FB_D int tiles_in_strip(const Call &call) {
  const int rows = shape().threads / shape().lanes * SLOTS;
  return (call.rows + rows - 1) / rows;
}
template <class D> FB_D void load_rotated(const Call &call, const Tile &t, bool again, Vector<D> (&x)[SLOTS]) {
  load<D>(call.x, t, again, x);
  rotate<D>(spec<0>(), call.requests[0], t, x);
}

// Return the address of a thread's vectors of tile `number` in shared memory; the vectors of neighbouring threads are
// adjacent. A thread reads only what it has written itself, so no barrier is needed.
template <class D> FB_D uint4 *place_of(const Tile &t, int number) {
  return dynamic_shared() + number * (SLOTS * Vector<D>::WORDS / 4) * shape().threads + t.thread;
}
template <class D> FB_D void keep(const Tile &t, int number, const Vector<D> (&x)[SLOTS]) {
  uint4 *to = place_of<D>(t, number);
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
#pragma unroll
    for (int i = 0; i < Vector<D>::WORDS; i += 4, to += shape().threads)
      *to = uint4{x[k].w[i], x[k].w[i + 1], x[k].w[i + 2], x[k].w[i + 3]};
}
template <class D> FB_D void recall(const Tile &t, int number, Vector<D> (&x)[SLOTS]) {
  const uint4 *from = place_of<D>(t, number);
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
#pragma unroll
    for (int i = 0; i < Vector<D>::WORDS; i += 4, from += shape().threads)
      x[k].w[i] = from->x, x[k].w[i + 1] = from->y, x[k].w[i + 2] = from->z, x[k].w[i + 3] = from->w;
}

// The largest magnitudes of a thread's columns, as storage bits.
template <class D> struct ColumnTops {
  Vector<D> of;
  static FB_D uint32_t larger_of(uint32_t a, uint32_t b) {
    return Vector<D>::PER_WORD == 1 ? larger(a, b) : __vmaxu2(a, b);
  }
  FB_D void take(const Vector<D> (&x)[SLOTS]) {
    constexpr uint32_t SIZES = Vector<D>::PER_WORD == 1 ? MAGNITUDE : 0x7fff7fffu;
#pragma unroll
    for (int k = 0; k < SLOTS; k++)
#pragma unroll
      for (int j = 0; j < Vector<D>::WORDS; j++) of.w[j] = larger_of(of.w[j], x[k].w[j] & SIZES);
  }
  FB_D void join_warp() {  // combines the maxima of the threads of a warp that have the same columns
#pragma unroll
    for (int d = 1; d < WARP; d *= 2)
      if (d >= shape().lanes) {
#pragma unroll
        for (int j = 0; j < Vector<D>::WORDS; j++) of.w[j] = larger_of(of.w[j], __shfl_xor_sync(ALL, of.w[j], d));
      }
  }
};

// Combine the maxima of all threads, and compute the block of each column; one thread computes one block.
template <class D> FB_D void make_strip_blocks(const Spec &s, const Request &r, const Tile &t, ColumnTops<D> tops) {
  __shared__ uint32_t shared[STRIP_COLUMNS];
  const int columns = shape().lanes * WIDTH;
  if (t.thread < columns) shared[t.thread] = 0;
  __syncthreads();
  tops.join_warp();
  if (t.thread % WARP < shape().lanes) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) atomicMax(&shared[strip_column(t) + i], uint32_t(tops.of.get(i)));
  }
  __syncthreads();
  if (t.thread < columns) {
    const int col = t.col0 - strip_column(t) + t.thread;
    const Block b = make_block<D>(s, r, bits(D::widen(typename D::Storage(shared[t.thread]))), 0, col);
    if (s.encodes && col < t.cols) store_scale(s, r, b, 0, col);
    strip_blocks()[t.thread] = b;
  }
  __syncthreads();
}

}  // namespace fb
