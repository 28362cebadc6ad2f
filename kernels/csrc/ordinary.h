// Determines which blocks the fast loops can process (ordinary blocks); all other blocks are processed element by
// element.
#pragma once
#include "scale.h"

namespace fb {

// True if no block is ordinary: the overflow rule is not to saturate, or a wide grid has a scaling.
FB_HD bool exact_only(const Scaling &s, const Grid &g) { return g.overflow != g.max || (g.wide && s.kind != NONE); }

// The range of the amaxes of ordinary blocks (in a naive cast: of vectors). In this range all values are finite,
// nothing overflows the dtype, and no result except zero is below the normal range of float32. All-zero blocks are
// ordinary too.
struct Bounds {
  float least, most;
};
template <class D> FB_HD Bounds ordinary_bounds(const Scaling &s, const Grid &g) {
  float smallest = value(g.min_exponent) * power_of_two(int(g.dropped) - 23);
  float most = s.kind != NONE ? D::max / 4 : smaller(D::max / 4, g.wide ? g.max / 2 : 2 * g.max);
  float least = s.kind == NONE ? 0.0f : FLOAT_MIN_NORMAL * 4 * (g.max / smallest);
  return Bounds{least, exact_only(s, g) ? -1.0f : most};
}
FB_HD bool is_ordinary(const Scaling &s, float amax, const Scale &scale, const Bounds &bounds) {
  bool plain = (amax <= bounds.most) & ((amax >= bounds.least) | (amax == 0.0f));
  if (s.divides()) plain &= divisible(scale.encode);
  if (s.two_levels()) plain &= (scale.code != 0) | (amax == 0.0f);
  return plain;
}

}  // namespace fb
