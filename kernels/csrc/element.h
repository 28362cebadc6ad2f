// One element through everything that can happen to it, and what statistics count of it: the way of last resort of the
// fast loops of every backend, which tests hold to the same bits.
#pragma once
#include "philox.h"
#include "scale.h"

namespace fb {

struct Tally {
  int64_t error, nonzero, flushed, saturated, capped, nonfinite, lost;
};

// |x - y| / |x| as a whole number of 2^-23 (nearest even), at most 1.
FB_HD uint32_t error_units(float x, float y, bool *capped) {
  float r = magnitude(x - y) / magnitude(x);
  *capped = r > 1.0f;
  return bits((r < 1.0f ? r : 1.0f) + 1.0f) - 0x3f800000u;
}

// One element of any kind: wide grids, naive casts of huge or non-finite values, scales at the end of float32.
struct Element {
  float q;  // on the grid
  float y;  // what the tensor receives, before narrowing
  bool saturated;
};
template <class D>
FB_HD Element element(float x, const Grid &g, const Scale &s, int scaling, bool stochastic, uint64_t index,
                      uint64_t seed) {
  if (!finite(x)) {  // only reached under `none`: a value that is no number never becomes one
    float kept = bits(magnitude(x)) == INF && g.inf ? x : value(NAN_BITS);
    return Element{kept, kept, false};
  }
  float v = bounded(x * s.encode, g), q;
  if (!finite(v)) {
    q = v;  // scaled beyond float32: an overflow
  } else if (!stochastic) {
    q = g.wide ? nearest<true>(v, g) : nearest<false>(v, g);
  } else {
    uint32_t high = rounding_high(index, seed);
    if (g.wide) {
      Drawn<true> d = draw<true>(v, g);
      Move m = decide(d, high);
      q = m == GO || (m == ASK && goes(d, high, rounding_low(index, seed))) ? moved(d, g, v) : d.near;
    } else {
      Drawn<false> d = draw<false>(v, g);
      Move m = decide(d, high);
      q = m == GO || (m == ASK && goes(d, high, rounding_low(index, seed))) ? moved(d, g, v) : d.near;
    }
  }
  bool over = magnitude(q) > g.max;
  q = with_sign(s.decode == 0.0f ? 0.0f : limited(q, g), x);  // two levels: nothing is left of a block whose scale is 0
  float y = scaling == AMAX || scaling == GAM ? q / s.encode : (q * s.decode) * s.outer;
  if (finite(q) && magnitude(y) > D::max) y = with_sign(D::max, y);  // finite in, finite out
  return Element{q, y, over};
}

}  // namespace fb
