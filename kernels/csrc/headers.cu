// Calls every function of the shared headers in one kernel, so that compiling this file for a GPU compiles them all.
#include "element.h"
#include "hadamard.h"
#include "noise.h"
#include "philox.h"
#include "scale.h"

namespace fb {

__device__ float through(const Grid &g, float v, uint64_t i, uint64_t seed) {
  float b = bounded(v, g), q = limited(g.wide ? nearest<true>(b, g) : nearest<false>(b, g), g);
  Drawn<true> wide = draw<true>(b, g);
  Drawn<false> narrow = draw<false>(b, g);
  uint32_t high = rounding_high(i, seed), low = rounding_low(i, seed);
  if (decide(wide, high) == GO || (decide(wide, high) == ASK && goes(wide, high, low))) q += moved(wide);
  if (decide(narrow, high) == GO || (decide(narrow, high) == ASK && goes(narrow, high, low))) q += moved(narrow);
  return with_sign(q, v);
}

__device__ float stored_and_back(const Grid &g, int scaling, float q, uint32_t code) {
  float v = magnitude_value(magnitude_code(q, g), g), scale = stored_scale(scaling, code);
  return within<Bf16>(two_levels(scaling) ? by_two_levels(v, scale, q) : v * scale, v);
}

template <class D> __device__ float stored(float v) { return D::widen(D::narrow(smaller(magnitude(v), D::max))); }

}  // namespace fb

extern "C" __global__ void every_header(const fb::Grid *grid, const float *x, float *y, uint32_t *codes, int scaling,
                                        float amax, float bits, uint64_t seed) {
  uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x;
  fb::Grid g = grid[0];
  fb::Group group = fb::make_group(scaling, g.max, amax);
  fb::Scale s = fb::make_scale(scaling, g.max, fb::magnitude(x[i]), group);
  float q = fb::through(g, x[i] * s.encode, i, seed);
  float chunk[16];
  fb::Signs signs{{uint32_t(seed), 0, 0, 0}};
  for (int k = 0; k < 16; k++) chunk[k] = signs.apply(x[16 * i + k] * fb::first_factor(16), k);
  fb::butterflies(chunk, fb::largest_power(16), 1);
  float noise = fb::gaussian_value(fb::gaussian_word(i >> 3, seed), i & 7) + fb::uniform_value(uint32_t(i) & 0xffffu);
  y[i] = fb::quotient(q, s.encode, s.decode) + chunk[i & 15] * (fb::odd_power(16) ? fb::ROOT_HALF : 1.0f) +
         noise * fb::noise_scale(bits, amax) + fb::stored<fb::Bf16>(q) + fb::stored<fb::Fp16>(q) +
         fb::stored<fb::Fp32>(q) + fb::stored_and_back(g, scaling, q, s.code);
  codes[i] = fb::magnitude_code(q, g) | s.code << 16 | uint32_t(fb::finite(q));
}
