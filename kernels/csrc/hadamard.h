// The random Hadamard transform x' = x S H, with S = diag(signs) and H the orthonormal Sylvester matrix, as butterflies
// in the order h = 1, 2, 4, …. A last chunk that is shorter than the transform is cut into powers of two, the largest
// first, so products of rotated operands are correct for any length. The result is rounded to the tensor's dtype, as in
// TransformerEngine.
#pragma once
#include "numeric.h"

namespace fb {

struct Signs {
  uint32_t negative[4];  // bit i: element i of the chunk changes its sign
  FB_HD float apply(float v, int i) const { return value(bits(v) ^ ((negative[(i >> 5) & 3] >> (i & 31)) << 31)); }
};

// Return 2^-floor(k/2) for n = 2^k: this part of the norm 2^-(k/2) is applied first and is exact; for odd k the factor
// ROOT_HALF is applied last.
FB_HD float first_factor(int n) {
  int k = 0;
  while ((2 << k) <= n) k++;
  return value(uint32_t(127 - k / 2) << 23);
}
FB_HD bool odd_power(int n) { return (n & 0xAAAAAAAA) != 0; }
constexpr float ROOT_HALF = 0.70710678118654752f;

FB_HD int largest_power(int n) {
  int p = 1;
  while (2 * p <= n) p *= 2;
  return p;
}

// Transform n = 2^k values, which are `stride` apart, in place.
FB_HD void butterflies(float *v, int n, int stride) {
  for (int h = 1; h < n; h *= 2)
    for (int i = 0; i < n; i++)
      if (!(i & h)) {
        float a = v[i * stride], b = v[(i + h) * stride];
        v[i * stride] = a + b;
        v[(i + h) * stride] = a - b;
      }
}

}  // namespace fb
