// Computes the packed codes of a thread's eight columns from grid values, and loads and stores eight codes at once.
#pragma once
#include "tile.cuh"

namespace fb {

struct Codes {
  uint64_t low, high;  // as in memory: the first code is in the lowest bits of low; high is used by codes of two bytes
  FB_D void put(int i, uint32_t code, int width) {
    uint64_t part = uint64_t(code) << (i * width & 63);
    if (i * width < 64) {
      low |= part;
    } else {
      high |= part;
    }
  }
  FB_D uint32_t get(int i, int width) const {
    return uint32_t((i * width < 64 ? low : high) >> (i * width & 63)) & ((1u << width) - 1u);
  }
};

// Store the first `valid` of eight codes; the remaining bits of the last byte become 0.
FB_D void store_codes(const Packed &p, int row, int col, Codes c, int valid, int width) {
  uint8_t *to = p.at(row, col, width);
  if (valid == WIDTH && p.aligned && width % 2 == 0) {
    if (width == 16) {
      __stcs((uint4 *)to, uint4{uint32_t(c.low), uint32_t(c.low >> 32), uint32_t(c.high), uint32_t(c.high >> 32)});
    } else if (width == 8) {
      __stcs((uint2 *)to, uint2{uint32_t(c.low), uint32_t(c.low >> 32)});
    } else if (width == 4) {
      __stcs((uint32_t *)to, uint32_t(c.low));
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (2 * i < width) __stcs((uint16_t *)to + i, uint16_t(c.low >> 16 * i));
    }
    return;
  }
  if (valid * width < 64) c.low &= (1ull << valid * width) - 1;
#pragma unroll
  for (int i = 0; i < 2 * WIDTH; i++)
    if (i < width && 8 * i < valid * width) to[i] = uint8_t((i < 8 ? c.low : c.high) >> (8 * i & 63));
}
FB_D Codes load_codes(const Packed &p, int row, int col, int valid, int width) {
  const uint8_t *from = p.at(row, col, width);
  Codes c{0, 0};
  if (valid == WIDTH && p.aligned && width % 2 == 0) {
    if (width == 16) {
      uint4 w = __ldcs((const uint4 *)from);
      c.low = w.x | uint64_t(w.y) << 32, c.high = w.z | uint64_t(w.w) << 32;
    } else if (width == 8) {
      uint2 w = __ldcs((const uint2 *)from);
      c.low = w.x | uint64_t(w.y) << 32;
    } else if (width == 4) {
      c.low = __ldcs((const uint32_t *)from);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (2 * i < width) c.low |= uint64_t(__ldcs((const uint16_t *)from + i)) << 16 * i;
    }
    return c;
  }
#pragma unroll
  for (int i = 0; i < 2 * WIDTH; i++)
    if (i < width && 8 * i < valid * width) (i < 8 ? c.low : c.high) |= uint64_t(from[i]) << (8 * i & 63);
  return c;
}

// Store the codes of a thread's eight rows and columns as those of eight lines, one for each column.
FB_D void store_transposed(const Packed &p, const Tile &t, const Codes (&codes)[SLOTS], int width) {
  const int left = t.rows - t.row0, valid = left < SLOTS ? left : SLOTS;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    Codes line{0, 0};
#pragma unroll
    for (int k = 0; k < SLOTS; k++) line.put(k, codes[k].get(i, width), width);
    if (valid > 0 && t.col0 + i < t.cols) store_codes(p, t.col0 + i, t.row0, line, valid, width);
  }
}

// Return the codes of eight grid values whose magnitudes are at most the grid's largest value.
FB_D Codes plain_codes(const Spec &s, const float (&q)[WIDTH]) {
  const Grid g = s.grid.grid();
  Codes c{0, 0};
#pragma unroll
  for (int i = 0; i < WIDTH; i++)
    c.put(i, magnitude_code(q[i], g) | (bits(q[i]) >> 31) << (s.encodes - 1), stored_bits(s.encodes));
  return c;
}

// True if the GPU's conversion instruction for the format with these constants gives our codes. For values on the grid
// the instruction rounds nothing, saturates nothing, gives no NaN, and keeps subnormals and the sign of zero. Our
// format may have more special codes (inf, NaN) than the format of the instruction, because no value on our grid has
// such a code. `most` are the float32 bits of the largest value of the instruction's format.
FB_D constexpr bool laid_out(const Spec &s, int bits, uint32_t mantissa_bits, int min_exponent, uint32_t most) {
  return s.encodes == bits && s.grid.dropped == 23 - mantissa_bits &&
         s.grid.min_exponent == uint32_t(127 + min_exponent) << 23 && !s.grid.wide && s.grid.max <= most;
}
constexpr uint32_t BITS_6 = 0x40c00000u, BITS_7_5 = 0x40f00000u, BITS_28 = 0x41e00000u, BITS_448 = 0x43e00000u,
                   BITS_57344 = 0x47600000u;
#ifdef __CUDA_ARCH__
#define FB_PAIRS(name, format)                                                                     \
  FB_D Codes name(const float (&q)[WIDTH], int width) {                                            \
    Codes c{0, 0};                                                                                 \
    _Pragma("unroll") for (int i = 0; i < WIDTH; i += 2) {                                         \
      uint16_t two; /* two codes of a byte; the lower byte is that of q[i] */                      \
      asm("cvt.rn.satfinite." format "x2.f32 %0, %1, %2;" : "=h"(two) : "f"(q[i + 1]), "f"(q[i])); \
      c.put(i, two & 0xffu, width), c.put(i + 1, two >> 8, width);                                 \
    }                                                                                              \
    return c;                                                                                      \
  }
#if __CUDA_ARCH__ >= 890
FB_PAIRS(e4m3_codes, "e4m3")
FB_PAIRS(e5m2_codes, "e5m2")
#endif
#if __CUDA_ARCH__ >= 1000 && (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FEAT_SM100_ALL))
#define FB_FOUR_AND_SIX_BITS
FB_PAIRS(e2m3_codes, "e2m3")
FB_PAIRS(e3m2_codes, "e3m2")
FB_D Codes e2m1_codes(const float (&q)[WIDTH]) {
  uint32_t eight;
  asm("{\n"
      ".reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d};\n"
      "}"
      : "=r"(eight)
      : "f"(q[0]), "f"(q[1]), "f"(q[2]), "f"(q[3]), "f"(q[4]), "f"(q[5]), "f"(q[6]), "f"(q[7]));
  return Codes{eight, 0};
}
#endif
#undef FB_PAIRS
#endif

FB_D Codes codes_of(const Spec &s, const float (&q)[WIDTH]) {
#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 890
  if (laid_out(s, 8, 3, -6, BITS_448)) return e4m3_codes(q, 8);
  if (laid_out(s, 8, 2, -14, BITS_57344)) return e5m2_codes(q, 8);
#endif
#ifdef FB_FOUR_AND_SIX_BITS
  if (laid_out(s, 6, 3, 0, BITS_7_5)) return e2m3_codes(q, 6);
  if (laid_out(s, 6, 2, -2, BITS_28)) return e3m2_codes(q, 6);
  if (laid_out(s, 4, 1, 0, BITS_6)) return e2m1_codes(q);
#endif
#endif
  return plain_codes(s, q);
}

}  // namespace fb
