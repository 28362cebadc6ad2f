// Quantizes one element in every case, and defines what the statistics count for it. The fast loops of the CPU and CUDA
// kernels use this code for the elements that they cannot process; tests check that both give the same bits.
#pragma once
#include "philox.h"
#include "scale.h"

namespace fb {

struct Tally {
  int64_t error, nonzero, flushed, saturated, capped, nonfinite, lost;
};

// Return |x - y| / |x| as an integer in units of 2^-23 (nearest even), at most 1.
FB_HD uint32_t error_units(float x, float y, bool *capped) {
  float r = magnitude(x - y) / magnitude(x);
  *capped = r > 1.0f;
  return bits((r < 1.0f ? r : 1.0f) + 1.0f) - ONE;
}

// Round a finite scaled value to the grid; `high` are the first 16 random bits of the element with this index.
template <bool WIDE>
FB_HD float rounded(float v, const Grid &g, bool stochastic, uint32_t high, uint64_t index, uint64_t seed) {
  if (!stochastic) return nearest<WIDE>(v, g);
  Drawn<WIDE> d = draw<WIDE>(v, g);
  Move m = decide(d, high);
  return m == GO || (m == ASK && goes(d, high, rounding_low(index, seed))) ? moved(d) : d.near;
}

// Round like `rounded`, but with only the first 16 random bits; *ask becomes 1 if these bits do not decide.
template <bool WIDE, bool STOCHASTIC>
FB_HD float rounded_at_once(float v, const Grid &g, uint32_t high, uint32_t *ask) {
  if (!STOCHASTIC) return nearest<WIDE>(v, g);
  Drawn<WIDE> d = draw<WIDE>(v, g);
  uint32_t t = threshold(d);
  *ask |= t == high;
  return high < t ? moved(d) : d.near;
}

// The result of quantizing one element in any case: also for wide grids, naive casts of huge or non-finite values, and
// scales at the ends of the range of float32.
struct Element {
  float q;         // the grid value
  float y;         // the returned value, before it is narrowed to the dtype
  bool saturated;  // the rounding overflowed
};
template <class D>
FB_HD Element element(float x, const Grid &g, const Scale &s, bool divides, bool stochastic, uint64_t index,
                      uint64_t seed) {
  if (!finite(x)) {  // occurs only with scaling `none`: a non-finite value never becomes finite
    float kept = bits(magnitude(x)) == INF && g.inf ? x : value(NAN_BITS);
    return Element{kept, kept, false};
  }
  float v = bounded(x * s.encode, g), q;
  if (!finite(v)) {
    q = v;  // x * encode is beyond float32, so it overflows
  } else {
    uint32_t high = stochastic ? rounding_high(index, seed) : 0;
    q = g.wide ? rounded<true>(v, g, stochastic, high, index, seed)
               : rounded<false>(v, g, stochastic, high, index, seed);
  }
  bool over = magnitude(q) > g.max;
  q = with_sign(s.decode == 0.0f ? 0.0f : limited(q, g), x);  // TWO_LEVEL: a block whose scale is 0 becomes zeros
  float y = divides ? q / s.encode : (q * s.decode) * s.outer;
  if (finite(q) && magnitude(y) > D::max) y = with_sign(D::max, y);  // finite in, finite out
  return Element{q, y, over};
}

// Four Over Six chooses between two scales, which map a block's amax to 4 or to 6. `four_less_six` compares the errors
// of a magnitude with both scales: the squared error with the scale for 4 minus that with the scale for 6, in units of
// 2^-32 of the block's squared amax; or with MAE the difference of the errors in units of 2^-23 of amax; or with MAX
// both errors, in two halves. These are integers, so the results of `joined` do not depend on the order.
struct FourOverSix {
  Scale six, four;
  float amax;
  uint32_t select;
};
FB_HD float error_offset(uint32_t select) { return select > Select::MSE ? 1.0f : 128.0f; }  // its last place is a unit
FB_HD int32_t units_of(float error, uint32_t select) {  // error / amax, at most 1, as an integer; NaN counts as 1
  const float offset = error_offset(select);
  return int32_t(bits((error < 1.0f ? error : 1.0f) + offset) - bits(offset));
}
FB_HD int64_t compared(uint32_t select, int32_t four, int32_t six) {
  if (select == Select::MAX) return int64_t(four) << 32 | six;
  const int64_t less = four - six;
  return select == Select::MAE ? less : less * (four + six);
}
FB_HD int64_t joined(uint32_t select, int64_t a, int64_t b) {
  if (select != Select::MAX) return a + b;
  const int64_t four = a >> 32 > b >> 32 ? a >> 32 : b >> 32;
  return four << 32 | (uint32_t(a) > uint32_t(b) ? uint32_t(a) : uint32_t(b));
}
FB_HD bool prefers_four(uint32_t select, int64_t sum) {
  return select == Select::MAX ? sum >> 32 < int64_t(uint32_t(sum)) : sum < 0;
}
FB_HD float scaled(float size, const Grid &g, const Scale &s) { return bounded(size * s.encode, g); }
// Return the error |size - returned value| in units of 2^-16 (MAE, MAX: 2^-23) of the block's amax, at most amax.
FB_HD int32_t error_units(float size, float q, const Grid &g, const Scale &s, float amax, uint32_t select) {
  float y = smaller((smaller(q, g.max) * s.decode) * s.outer, FLOAT_MAX);
  return units_of(magnitude(size - y) / amax, select);
}
FB_HD int64_t four_less_six(float size, const Grid &g, const FourOverSix &b, float four, float six) {
  return compared(b.select, error_units(size, four, g, b.four, b.amax, b.select),
                  error_units(size, six, g, b.six, b.amax, b.select));
}
FB_HD int64_t four_less_six(float size, const Grid &g, const FourOverSix &b, bool stochastic, uint32_t high,
                            uint64_t index, uint64_t seed) {
  return four_less_six(size, g, b, rounded<false>(scaled(size, g, b.four), g, stochastic, high, index, seed),
                       rounded<false>(scaled(size, g, b.six), g, stochastic, high, index, seed));
}
FB_HD FourOverSix four_over_six(const Scaling &s, float max, const Group &group, float amax) {
  return FourOverSix{make_scale(s, max, amax, group), make_scale(s, max, amax, group, value(s.expansion)), amax,
                     s.select};
}
template <bool STOCHASTIC>
FB_HD int64_t four_less_six_at_once(float size, const Grid &g, const FourOverSix &b, uint32_t high, uint32_t *ask) {
  return four_less_six(size, g, b, rounded_at_once<false, STOCHASTIC>(scaled(size, g, b.four), g, high, ask),
                       rounded_at_once<false, STOCHASTIC>(scaled(size, g, b.six), g, high, ask));
}

// MS-EDEN corrects a block's scale by two sums over its scaled magnitudes v and their rounded values q: v·v in units of
// 2^-20 and v·q in units of 2^-11, where v is an integer in units of 2^-10. |v| < 10, because E4M3 rounds a scale down
// by at most a third, or to zero. So the sums over a block of 16 fit in 32 bits and do not depend on the order.
struct Products {
  uint32_t squares, products;
};
FB_HD Products products(float v, float q) {
  uint32_t units = bits(v + 8192.0f) - 0x46000000u;  // 8192's last place is 2^-10
  return Products{units * units, units * uint32_t(2.0f * q)};
}
// Return the scale s with corrected `code` and `decode`, rounded stochastically to the grid of stored scales. `number`
// is the number of the block, which is the element index of its random bits.
FB_HD Scale corrected(Scale s, const Grid &stored, const Products &sums, uint64_t number, uint64_t seed) {
  float factor = sums.products ? float(sums.squares) / (float(sums.products) * 512.0f) : 1.0f;
  float to = smaller(s.decode * factor, stored.max);
  s.decode = rounded<false>(to, stored, true, rounding_high(number, seed), number, seed);
  s.code = magnitude_code<false>(s.decode, stored);
  return s;
}

}  // namespace fb
