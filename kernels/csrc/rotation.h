// Computes the Hadamard rotation (hadamard.h) on the CPU, along rows and along columns.
#pragma once
#include <algorithm>
#include "hadamard.h"
#include "memory.h"
#include "vector.h"

namespace fb {

template <int H> FB_INLINE F32x16 butterfly16(const F32x16 &v) {
  return crossed<H>(v) + select((lane_numbers() & H) < 1, v, -v);
}
FB_INLINE void butterflies_in_lanes(float *t, int size) {  // on 16 values, size <= 16
  F32x16 v = butterfly16<1>(load(t));
  if (size > 2) v = butterfly16<2>(v);
  if (size > 4) v = butterfly16<4>(v);
  if (size > 8) v = butterfly16<8>(v);
  store(t, v);
}

template <class D> struct Rotation {
  int size;
  Signs signs;
  float sign_and_factor[128];

  Rotation(int size, const Signs &signs) : size(size), signs(signs) {
    for (int i = 0; i < size; i++) sign_and_factor[i] = signs.apply(first_factor(size), i);
  }
  void finish(const float *t, int n, bool root, Cell<D> *y) const {
    for (int i = 0; i < n; i++) y[i] = D::narrow(root ? t[i] * ROOT_HALF : t[i]);
  }
  // Rotate one row of n columns; n is a multiple of `size`, except in the last tile of a row of the matrix.
  void along(const Cell<D> *x, int64_t n, Cell<D> *y) const {
    constexpr int BATCH = 128;
    float t[BATCH];
    int64_t whole = n / size * size;
    for (int64_t start = 0; start < whole; start += BATCH) {
      int run = int(std::min<int64_t>(BATCH, whole - start));
      for (int i = 0; i < run; i += size)
        for (int k = 0; k < size; k++) t[i + k] = D::widen(x[start + i + k]) * sign_and_factor[k];
      int inner = std::min(size, 16);
      if (run % 16 == 0) {
        for (int i = 0; i < run; i += 16) butterflies_in_lanes(t + i, inner);
      } else {
        for (int i = 0; i < run; i += inner) butterflies(t + i, inner, 1);
      }
      for (int h = 16; h < size; h *= 2)
        for (int i = 0; i < run; i += 2 * h)
          for (int k = i; k < i + h; k++) {
            float a = t[k], b = t[k + h];
            t[k] = a + b;
            t[k + h] = a - b;
          }
      finish(t, run, odd_power(size), y + start);
    }
    for (int64_t start = whole, in_chunk = 0; start < n;) {
      int piece = largest_power(int(n - start));
      for (int k = 0; k < piece; k++)
        t[k] = signs.apply(D::widen(x[start + k]), int(in_chunk) + k) * first_factor(piece);
      butterflies(t, piece, 1);
      finish(t, piece, odd_power(piece), y + start);
      start += piece, in_chunk += piece;
    }
  }
  // Rotate a chunk of 16 rows, the usual size, for as many columns as a register has lanes.
  void down_sixteen(const Cell<D> *x, int64_t x_stride, Cell<D> *y, int64_t y_stride) const {
    F32x16::Part v[16];
    for (int k = 0; k < 16; k++) {
      float line[REGISTER];
      for (int i = 0; i < REGISTER; i++) line[i] = D::widen(x[k * x_stride + i]) * sign_and_factor[k];
      memcpy(&v[k], line, sizeof line);
    }
#pragma GCC unroll 4
    for (int h = 1; h < 16; h *= 2)
#pragma GCC unroll 16
      for (int k = 0; k < 16; k++)
        if (!(k & h)) {
          F32x16::Part a = v[k], b = v[k + h];
          v[k] = a + b;
          v[k + h] = a - b;
        }
    for (int k = 0; k < 16; k++) {
      float line[REGISTER];
      memcpy(line, &v[k], sizeof line);
      for (int i = 0; i < REGISTER; i++) y[k * y_stride + i] = D::narrow(line[i]);
    }
  }
  // Rotate n columns of `rows` rows along the columns; `rows` is a multiple of `size`, except in the last tile.
  void down(const Cell<D> *x, int64_t x_stride, int64_t rows, int64_t n, Cell<D> *y, int64_t y_stride) const {
    constexpr int LANE = 64;
    float t[128 * LANE];
    for (int64_t first = 0; first < rows;) {
      int64_t left = rows - first, in_chunk = first % size;
      int piece = left + in_chunk >= size ? size : largest_power(int(left));
      int64_t c = 0;
      if (size == 16 && piece == 16)
        for (; c + REGISTER <= n; c += REGISTER)
          down_sixteen(x + first * x_stride + c, x_stride, y + first * y_stride + c, y_stride);
      for (; c < n; c += LANE) {
        int width = int(std::min<int64_t>(LANE, n - c));
        for (int k = 0; k < piece; k++) {
          float factor = signs.apply(first_factor(piece), int(in_chunk) + k);
          const Cell<D> *from = x + (first + k) * x_stride + c;
          for (int i = 0; i < width; i++) t[k * LANE + i] = D::widen(from[i]) * factor;
        }
        for (int h = 1; h < piece; h *= 2)
          for (int k = 0; k < piece; k++)
            if (!(k & h))
              for (int i = 0; i < LANE; i++) {
                float a = t[k * LANE + i], b = t[(k + h) * LANE + i];
                t[k * LANE + i] = a + b;
                t[(k + h) * LANE + i] = a - b;
              }
        for (int k = 0; k < piece; k++) finish(t + k * LANE, width, odd_power(piece), y + (first + k) * y_stride + c);
      }
      first += piece;
    }
  }
};

}  // namespace fb
