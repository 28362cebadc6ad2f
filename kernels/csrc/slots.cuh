// Access to a thread's eight slots by an index that is unknown at compile time: their random bits, their vectors and
// the values kept for their blocks.
#pragma once
#include "tile.cuh"

namespace fb {

// The 16 random bits of each of eight consecutive elements, two elements per word.
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

// The values kept for the blocks of one slot (see `known`), by an index that is unknown at compile time.
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
