// Rotates a tile in registers (hadamard.h): first butterflies within a thread's eight values, then between threads.
#pragma once
#include "tile.cuh"

namespace fb {

// Return the size of the piece that contains position p if n values are cut into pieces whose sizes are powers of two,
// the largest first; 1 for p >= n.
FB_D int piece_size(int p, int n) {
  int start = 0;
  for (int b = 128; b > 0; b /= 2)
    if (n & b) {
      if (p < start + b) return b;
      start += b;
    }
  return 1;
}

// Return the value v of the thread whose number differs from this thread's in the bit `distance`.
FB_D float partners(float v, int distance, int thread) {
  if (distance < WARP) return __shfl_xor_sync(ALL, v, distance);
#ifdef FB_SIMT
  constexpr bool ever = true;
#else
  constexpr Shape sh = shape();
  constexpr Spec a = spec<0>(), b = spec<1>();
  constexpr bool ever =
      (a.down ? a.hadamard : 0) / WIDTH * sh.lanes > WARP || (b.down ? b.hadamard : 0) / WIDTH * sh.lanes > WARP;
#endif
  __shared__ float exchanged[ever ? MAX_WARPS * WARP : 1];
  if (!ever) return v;
  exchanged[thread] = v;
  __syncthreads();
  float other = exchanged[thread ^ distance];
  __syncthreads();
  return other;
}

// Rotate eight consecutive values along the axis. The first is at position p of its chunk, and the matrix has n values
// from the start of that chunk on. `negative` are the signs of the eight values. `step` is the distance to the thread
// that has the next eight values. WHOLE: no chunk is cut by the edge of the matrix.
template <bool WHOLE>
FB_D void turn(const Spec &s, float (&v)[8], uint32_t negative, int p, int n, int step, int thread) {
  const int size = s.hadamard, inner = size < 8 ? size : 8;
  int own[8];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    int left = n - (j & ~(inner - 1));  // values of this value's chunk that are in the matrix
    own[j] = WHOLE ? size : piece_size((p + j) & (size - 1), left < 0 ? 0 : left < size ? left : size);
    const uint32_t sign = s.inverse ? 0u : negative >> j << 31;  // so the signed factor is the same for all lines
    v[j] = v[j] * value(bits(first_factor(own[j])) ^ sign);
  }
#pragma unroll
  for (int h = 1; h < 8; h *= 2)
    if (h < size) {
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (!(j & h) && h < own[j]) {
          float a = v[j], b = v[j + h];
          v[j] = a + b;
          v[j + h] = a - b;
        }
    }
#pragma unroll
  for (int h = 8; h < 128; h *= 2)
    if (h < size) {
      const float sign = p & h ? -1.0f : 1.0f;  // other + v or other - v, rounded once
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float other = partners(v[j], h / 8 * step, thread);
        if (h < own[j]) v[j] = fused(v[j], sign, other);
      }
    }
#pragma unroll
  for (int j = 0; j < 8; j++) {
    if (odd_power(own[j])) v[j] = v[j] * ROOT_HALF;
    if (s.inverse) v[j] = value(bits(v[j]) ^ (negative >> j << 31));
  }
}

// Return the signs of the eight positions from p on, as bits.
FB_D uint32_t eight_signs(const Spec &s, const Request &r, int p) {
  if (s.hadamard >= 8) return r.negative(s, p >> 5) >> (p & 31);
  uint32_t few = r.negative(s, 0) & ((1u << s.hadamard) - 1u), all = 0;
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    if (j % s.hadamard == 0) all |= few << j;
  return all;
}

FB_D int limited_to_128(int n) { return n < 0 ? 0 : n < 128 ? n : 128; }

template <class D, bool WHOLE>
FB_D void rotate_tile(const Spec &s, const Request &r, const Tile &t, Vector<D> (&x)[SLOTS]) {
  const int size = s.hadamard;
  if (s.down) {
    int p = int(t.row0 % size);
    int n = limited_to_128(t.rows - (t.row0 - p));
    uint32_t negative = eight_signs(s, r, p);
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) {  // two columns, which are narrowed together
      float v[8], w[8];
#pragma unroll
      for (int k = 0; k < SLOTS; k++) v[k] = D::widen(x[k].get(i)), w[k] = D::widen(x[k].get(i + 1));
      turn<WHOLE>(s, v, negative, p, n, shape().lanes, t.thread);
      turn<WHOLE>(s, w, negative, p, n, shape().lanes, t.thread);
#pragma unroll
      for (int k = 0; k < SLOTS; k++) x[k].set_two(i, v[k], w[k]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < SLOTS; k++) {
      int p = int(t.col(k) % size);
      int n = limited_to_128(t.cols - (t.col(k) - p));
      uint32_t negative = eight_signs(s, r, p);
      float v[8];
#pragma unroll
      for (int i = 0; i < WIDTH; i++) v[i] = D::widen(x[k].get(i));
      turn<WHOLE>(s, v, negative, p, n, 1, t.thread);
#pragma unroll
      for (int i = 0; i < WIDTH; i += 2) x[k].set_two(i, v[i], v[i + 1]);
    }
  }
}
template <class D> FB_D void rotate(const Spec &s, const Request &r, const Tile &t, Vector<D> (&x)[SLOTS]) {
  if (!s.hadamard) return;
  if (s.ragged) {
    rotate_tile<D, false>(s, r, t, x);
  } else {
    rotate_tile<D, true>(s, r, t, x);
  }
}

}  // namespace fb
