// Block scales: from a block's amax (and its group's) to the factor that encodes and the factors that decode. The order
// of operations is the specification, and is defined only here.
#pragma once
#include "numeric.h"

namespace fb {

enum Scaling { NONE = 0, AMAX = 1, GAM = 2, E8M0 = 3, MX = 4, NVFP4 = 5, UE5M3 = 6, FOUROVERSIX = 7, EDEN = 8 };

// Block scales in a format of their own, with a float32 scale of the tensor.
FB_HD constexpr bool two_levels(int scaling) { return scaling >= NVFP4; }
// Blocks share a value of their group.
FB_HD constexpr bool is_grouped(int scaling) { return scaling == GAM || two_levels(scaling); }

// x is quantized as q = round(x * encode) and restored as
//    amax, gam:            q / encode               (decode is 1 / encode, for `quotient`)
//    none, e8m0, mx:       (q * decode) * outer   with outer = 1: exact, a power of two
//    two levels:           (q * decode) * outer   with decode the block's scale and outer the tensor's: one rounding
struct Scale {
  float encode, decode, outer;
  uint32_t code;  // stored for the block: E8M0, E4M3 or UE5M3 code, or the float32 bits for amax
};
// q / encode, correctly rounded, without a division (Markstein 1990): decode is the rounded reciprocal, and one step
// with the exact remainder gives the nearest value (a zero may lose its sign). Encode and q / encode must be well
// within float32's range.
FB_HD float quotient(float q, float encode, float decode) {
  float t = q * decode;
  return fused(fused(-t, encode, q), decode, t);
}

// The value that a group of blocks shares: gam's ideal scale (only its mantissa matters), or the tensor's pair of
// scales.
struct Group {
  float encode, decode;
};

FB_HD float clamped(float scale) {  // to normal float32, so that its bits give its mantissa and exponent
  return scale < FLOAT_MIN_NORMAL ? FLOAT_MIN_NORMAL : smaller(scale, FLOAT_MAX);
}
FB_HD float ideal(float max, float amax) { return amax == 0.0f ? 1.0f : clamped(max / amax); }
FB_HD uint32_t mantissa(float v) { return bits(v) & 0x7fffffu; }
// Split a positive value into its binade's power of two and its fraction in [1, 2), subnormals included, exactly.
FB_HD float normalized(float v) { return v < FLOAT_MIN_NORMAL ? v * 8388608.0f : v; }
FB_HD int floor_log2(float v) { return exponent(bits(normalized(v))) - (v < FLOAT_MIN_NORMAL ? 23 : 0); }

// OCP E4M3 of a non-negative value, nearest even, saturating.
FB_HD constexpr Grid e4m3_grid() { return Grid{uint32_t(127 - 6) << 23, 20, 448.0f, 448.0f, 0, 0}; }
FB_HD float to_e4m3(float v) { return smaller(nearest<false>(smaller(v, 448.0f), e4m3_grid()), 448.0f); }
FB_HD uint32_t e4m3_code(float v) { return bits(v * 7.52316384526264e-37f) >> 20; }  // 2^-120 aligns the biases
FB_HD float e4m3_value(uint32_t code) { return value(code << 20) * 1.329227995784916e36f; }

// UE5M3, whose only NaN is 0xFF.
FB_HD constexpr Grid ue5m3_grid() { return Grid{uint32_t(127 - 14) << 23, 20, 114688.0f, 114688.0f, 0, 0}; }
FB_HD float to_ue5m3(float v) { return smaller(nearest<false>(smaller(v, 114688.0f), ue5m3_grid()), 114688.0f); }
FB_HD uint32_t ue5m3_code(float v) { return bits(v * 1.925929944387236e-34f) >> 20; }  // 2^-112

// The code stored for a block that is not finite.
FB_HD uint32_t nan_scale_code(int scaling) {
  return scaling == AMAX ? NAN_BITS : two_levels(scaling) && scaling != UE5M3 ? 0x7fu : 0xffu;
}

// The value that two-level scales map a block's amax to: for MS-EDEN slightly beyond the largest value, which has the
// least error on Gaussian data.
constexpr float EDEN_TOP = float(96.0 / 15.81);  // 6 * 16/17 / 0.93
FB_HD float two_level_top(int scaling, float max) { return scaling == EDEN ? EDEN_TOP : max; }

FB_HD Group make_group(int scaling, float max, float amax) {
  if (scaling == GAM) return Group{ideal(max, amax), 1.0f};  // blocks use only its mantissa
  if (two_levels(scaling)) {  // TransformerEngine: max and the E4M3 maximum are reached together by the tensor's amax
    float target = scaling >= FOUROVERSIX ? 256.0f : 448.0f;  // 256 leaves headroom for the factor 1.5
    float s = amax == 0.0f ? 1.0f : smaller((two_level_top(scaling, max) * target) / amax, FLOAT_MAX);
    return Group{s, 1.0f / s};
  }
  return Group{1.0f, 1.0f};
}

FB_HD Scale power_scale(int e) {  // encode by 2^e; the decode exponent is stored
  e = e < -127 ? -127 : e > 127 ? 127 : e;
  return Scale{power_of_two(e), power_of_two(-e), 1.0f, uint32_t(127 - e)};
}

FB_HD Scale two_level_scale(float s8, const Group &group) {
  return Scale{smaller(1.0f / (s8 * group.decode), FLOAT_MAX), s8, group.decode, e4m3_code(s8)};
}

// FOUR: the expansion of Four Over Six's scale for a block whose maximum becomes 4 instead of 6.
constexpr float FOUR = 1.5f;
FB_HD Scale make_scale(int scaling, float max, float amax, const Group &group, float expansion = 1.0f) {
  if (scaling == AMAX) {
    float s = ideal(max, amax);
    return Scale{s, 1.0f / s, 1.0f, bits(s)};
  }
  if (scaling ==
      GAM) {  // MoR algorithm 1: the group's mantissa, the block's exponent, rounded down so as not to saturate
    float s = amax == 0.0f ? group.encode : ideal(max, amax);
    int e = exponent(bits(s)) - (mantissa(s) < mantissa(group.encode) ? 1 : 0);
    e = e < -126 ? -126 : e;
    s = value(uint32_t(e + 127) << 23 | mantissa(group.encode));
    return Scale{s, 1.0f / s, 1.0f, uint32_t(e + 127)};
  }
  if (scaling == E8M0) {  // the ideal scale's exponent, floored: the largest power of two that cannot saturate
    int e = floor_log2(max) - floor_log2(amax) - (mantissa(normalized(amax)) > mantissa(max) ? 1 : 0);
    return power_scale(amax == 0.0f ? 0 : e);
  }
  if (scaling == MX) {  // OCP MX v1.0: floor(log2 amax) - emax; an amax in the top of its binade saturates
    return power_scale(amax == 0.0f ? 0 : floor_log2(max) - floor_log2(amax));
  }
  if (two_levels(scaling)) {
    float ideal_s8 = amax * (group.encode * (1.0f / two_level_top(scaling, max))) * expansion;
    Scale scale = two_level_scale(scaling == UE5M3 ? to_ue5m3(ideal_s8) : to_e4m3(ideal_s8), group);
    if (scaling == UE5M3) scale.code = ue5m3_code(scale.decode);
    return scale;
  }
  return Scale{1.0f, 1.0f, 1.0f, 0};
}

// The meaning of a stored block scale, which may come from any source: the factor that values are divided by (amax;
// gam, without its group's mantissa), the power of two that they are multiplied by, or the block's scale of two levels.
FB_HD float stored_scale(int scaling, uint32_t code) {
  if (scaling == NONE) return 1.0f;
  if (scaling == AMAX) return value((code & MAGNITUDE) > INF ? NAN_BITS : code);
  if (scaling == UE5M3) return magnitude_value<false>(code, ue5m3_grid());
  if (two_levels(scaling)) return value(bits(magnitude_value<false>(code & 0x7fu, e4m3_grid())) | (code & 0x80u) << 24);
  return code == 0xffu ? value(NAN_BITS) : power_of_two(int(code) - 127);
}
// Limit the value y of a grid value q before it is narrowed to D. Finite q gives a finite result; NaN stays NaN.
template <class D> FB_HD float within(float y, float q) {
  float most = (bits(q) & MAGNITUDE) == INF ? value(INF) : D::max, limited = most < y ? most : y;
  return -most > limited ? -most : limited;
}
FB_HD float by_two_levels(float q, float scale, float outer) {  // if the scale is 0, only signs are left
  return scale == 0.0f ? with_sign(0.0f, q) : (q * scale) * outer;
}

}  // namespace fb
