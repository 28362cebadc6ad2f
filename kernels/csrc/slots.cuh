// Access to a thread's eight slots by an index that is unknown at compile time: their vectors and the values kept for
// their blocks.
#pragma once
#include "tile.cuh"

namespace fb {

// The values from which `known` rebuilds the blocks of one slot, accessed by an index that is unknown at compile time.
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

}  // namespace fb
