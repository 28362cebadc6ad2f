// Block scales: computes the encode and decode factors of a block from its amax and the amax of its group.
// arithmetic.md specifies the order of operations; this file is its only implementation for the CPU and CUDA kernels.
#pragma once
#include "numeric.h"

namespace fb {

enum ScalingKind : uint32_t { NONE = 0, FLOAT = 1, MANTISSA = 2, POWER = 3, TWO_LEVEL = 4 };
struct ScaleRounding {
  enum : uint32_t { NEAREST = 0, UP = 1, FLOOR = 2, STOCHASTIC = 3 };
};

// How the errors of a block's two candidate scales are compared: MSE and DEFAULT by their squares, MAE by their sum,
// MAX by the largest one. With DEFAULT, scales are computed in the order of NVFP4, otherwise in that of Four Over Six.
struct Select {
  enum : uint32_t { DEFAULT = 0, MSE = 1, MAE = 2, MAX = 3 };
};

// A scaling, from its record in scalings.py; constants.py mirrors this structure field by field. Floats are their bits.
struct Scaling {
  uint32_t kind, rounding;
  GridWords stored;         // the grid of stored block scales
  uint32_t sign, nan_code;  // the sign bit of the codes of stored scales, and the code of a NaN block's scale
  uint32_t target;          // TWO_LEVEL: the scale of the block that contains the tensor's amax
  uint32_t top;             // TWO_LEVEL: the value that a block's amax is mapped to
  uint32_t expansion;       // the factor of a second candidate for a block's scale; 1: there is none
  uint32_t factor;          // POWER: elements are multiplied by it before rounding, and results divided by it
  uint32_t select;          // a Select: how two candidates are compared

  FB_HD constexpr bool two_levels() const { return kind == TWO_LEVEL; }
  FB_HD constexpr bool grouped() const { return kind == MANTISSA || kind == TWO_LEVEL; }  // there are group values
  FB_HD constexpr bool divides() const { return kind == FLOAT || kind == MANTISSA; }
  FB_HD constexpr bool compares() const { return expansion != ONE; }                       // Four Over Six
  FB_HD constexpr bool corrects() const { return rounding == ScaleRounding::STOCHASTIC; }  // MS-EDEN
};

// x is quantized as q = round(x * encode) and restored as
//    FLOAT, MANTISSA:  q / encode             (decode is 1 / encode, for `quotient`)
//    NONE, POWER:      (q * decode) * outer   (decode is a power of two and outer is 1 / factor, usually 1)
//    TWO_LEVEL:        (q * decode) * outer   (decode is the block's scale, and q * decode is exact; outer is the
//                                              tensor's scale, so there is only one rounding)
struct Scale {
  float encode, decode, outer;
  uint32_t code;  // the code that is stored for the block
};
// Return q / encode, correctly rounded, without a division (Markstein 1990): decode is the rounded reciprocal of
// encode, and one correction by the exact remainder gives the nearest value (a zero may lose its sign). Encode and q /
// encode must be well within float32's range; `divisible` checks this for encode.
FB_HD float quotient(float q, float encode, float decode) {
  float t = q * decode;
  return fused(fused(-t, encode, q), decode, t);
}

constexpr float DIVISIBLE_ABOVE = 8.6e-19f, DIVISIBLE_BELOW = 1.15e18f;  // 2^-60, 2^60
FB_HD bool divisible(float encode) { return encode > DIVISIBLE_ABOVE && encode < DIVISIBLE_BELOW; }

// The value that the blocks of a group share. MANTISSA: encode is the ideal scale of the group, of which only the
// mantissa is used. TWO_LEVEL: the encode factor and the scale (decode) of the tensor.
struct Group {
  float encode, decode;
};

FB_HD float clamped(float scale) {  // clamps to normal float32 numbers, whose bits contain mantissa and exponent
  return scale < FLOAT_MIN_NORMAL ? FLOAT_MIN_NORMAL : smaller(scale, FLOAT_MAX);
}
FB_HD float ideal(float max, float amax) { return amax == 0.0f ? 1.0f : clamped(max / amax); }
FB_HD uint32_t mantissa(float v) { return bits(v) & 0x7fffffu; }
// For a positive value v: `normalized` is v, or v * 2^23 if v is subnormal, so that its mantissa can be read from its
// bits; `floor_log2` is the exponent of v, exactly, also for subnormals.
FB_HD float normalized(float v) { return v < FLOAT_MIN_NORMAL ? v * 8388608.0f : v; }
FB_HD int floor_log2(float v) { return exponent(bits(normalized(v))) - (v < FLOAT_MIN_NORMAL ? 23 : 0); }

// TWO_LEVEL: round a block's scale to the grid of stored scales, to nearest even, at most the grid's largest value.
FB_HD float to_stored(float v, const Grid &g) { return nearest<false>(smaller(v, g.max), g); }

FB_HD Group make_group(const Scaling &s, float max, float amax) {
  if (s.kind == MANTISSA) return Group{ideal(max, amax), 1.0f};  // blocks use only the mantissa
  if (!s.two_levels()) return Group{1.0f, 1.0f};
  // As in TransformerEngine, the block with the tensor's amax has the scale `target`, and its amax is mapped to `top`.
  float g = amax == 0.0f ? 1.0f : smaller((value(s.top) * value(s.target)) / amax, FLOAT_MAX);
  return Group{g, 1.0f / g};
}
// Return the float32 bits that are stored for a group.
FB_HD uint32_t stored_group(const Scaling &s, const Group &group) {
  return s.kind == MANTISSA ? mantissa(group.encode) | ONE : bits(group.decode);
}

FB_HD Scale power_scale(int e) {  // encodes by 2^e and stores the exponent -e of the decode factor
  e = e < -127 ? -127 : e > 127 ? 127 : e;
  return Scale{power_of_two(e), power_of_two(-e), 1.0f, uint32_t(127 - e)};
}

FB_HD Scale two_level_scale(float s8, const Grid &stored, const Group &group) {
  return Scale{smaller(1.0f / (s8 * group.decode), FLOAT_MAX), s8, group.decode, magnitude_code<false>(s8, stored)};
}

FB_HD Scale make_scale(const Scaling &s, float max, float amax, const Group &group, float expansion = 1.0f) {
  switch (s.kind) {
    case FLOAT: {
      float scale = ideal(max, amax);
      return Scale{scale, 1.0f / scale, 1.0f, bits(scale)};
    }
    case MANTISSA: {  // MoR algorithm 1: the group's mantissa, and the largest exponent for which nothing saturates
      float scale = amax == 0.0f ? group.encode : ideal(max, amax);
      int e = exponent(bits(scale)) - (mantissa(scale) < mantissa(group.encode) ? 1 : 0);
      e = e < -126 ? -126 : e;
      scale = value(uint32_t(e + 127) << 23 | mantissa(group.encode));
      return Scale{scale, 1.0f / scale, 1.0f, uint32_t(e + 127)};
    }
    case POWER: {  // FLOOR: OCP MX v1.0, in which an amax near the upper end of its binade saturates. UP: no amax does
      int e = floor_log2(max) - floor_log2(amax);
      if (s.rounding == ScaleRounding::UP) e -= mantissa(normalized(amax)) > mantissa(max) ? 1 : 0;
      Scale scale = power_scale(amax == 0.0f ? 0 : e);
      scale.encode *= value(s.factor), scale.outer = 1.0f / value(s.factor);
      return scale;
    }
    case TWO_LEVEL: {
      Grid stored = s.stored.grid();
      float s8 = s.select ? (amax / value(s.top)) * group.encode : amax * (group.encode * (1.0f / value(s.top)));
      s8 = s8 * expansion;
      return two_level_scale(to_stored(s8, stored), stored, group);
    }
  }
  return Scale{1.0f, 1.0f, 1.0f, 0};
}

// Return the value of a stored block scale, for any code. FLOAT: the factor by which grid values are divided. MANTISSA:
// the power of two of this factor, without the group's mantissa. POWER: the power of two by which grid values are
// multiplied. TWO_LEVEL: the block's scale.
FB_HD float stored_scale(const Scaling &s, uint32_t code) {
  if (s.kind == NONE) return 1.0f;
  if (s.kind == FLOAT) return value((code & MAGNITUDE) > INF ? NAN_BITS : code);
  if (s.two_levels()) {
    float size = magnitude_value<false>(code & ~s.sign, s.stored.grid());
    return value(bits(size) | (code & s.sign ? SIGN : 0u));
  }
  return code == s.nan_code ? value(NAN_BITS) : power_of_two(int(code) - 127);
}
// Return the place of the scale of a line and a block along the sum in swizzled memory, with `across` tiles of 512
// bytes side by side (packing.py).
FB_HD int64_t swizzled(int64_t line, int64_t block, int64_t across) {
  return (line / 128 * across + block / 4) * 512 + line % 32 * 16 + line % 128 / 32 * 4 + block % 4;
}
// Limit y, the restored value of the grid value q, to the range of the dtype D before it is narrowed. A finite q gives
// a finite result; NaN stays NaN.
template <class D> FB_HD float within(float y, float q) {
  float most = (bits(q) & MAGNITUDE) == INF ? value(INF) : D::max, limited = most < y ? most : y;
  return -most > limited ? -most : limited;
}
// Return (q * scale) * outer; if the scale is 0, a zero with the sign of q.
FB_HD float by_two_levels(float q, float scale, float outer) {
  return scale == 0.0f ? with_sign(0.0f, q) : (q * scale) * outer;
}

}  // namespace fb
