// The scales of a row of blocks, as arrays so that the loop vectorises, and which of the blocks the fast loops can
// process.
#pragma once
#include "lanes.h"

namespace fb {

enum Kind : uint32_t { ORDINARY = 0, CAREFUL = 1, POISONED = 2 };

// Scales and kinds of n blocks, as arrays so that the loop vectorises. All-zero blocks, and blocks whose amax lies
// between the two bounds, are ordinary.
struct Bounds {
  float least, most;
};
struct BlockScales {
  float *encode, *decode;
  uint32_t *code, *kind;
};
template <int SCALING>
void scales(const uint32_t *amax, int64_t n, float max, const Group &group, const Bounds &bounds,
            const BlockScales &to) {
  constexpr bool DIVIDE = SCALING == AMAX || SCALING == GAM;
  const Group g = group;
  const Bounds ordinary = bounds;
  const uint32_t *__restrict from = amax;
  float *__restrict encode = to.encode, *__restrict decode = to.decode;
  uint32_t *__restrict code = to.code, *__restrict kind = to.kind;
  for (int64_t i = 0; i < n; i++) {
    float a = value(from[i]);
    Scale s = make_scale(SCALING, max, a, g);
    encode[i] = s.encode, decode[i] = s.decode, code[i] = s.code;
    uint32_t plain = uint32_t(a <= ordinary.most) & (uint32_t(a >= ordinary.least) | uint32_t(a == 0.0f));
    if (DIVIDE) plain &= uint32_t(s.encode > 8.6e-19f) & uint32_t(s.encode < 1.15e18f);  // 2^-60, 2^60: see `quotient`
    if (two_levels(SCALING)) plain &= uint32_t((s.code | uint32_t(a == 0.0f)) != 0);
    uint32_t poisoned = SCALING != NONE ? from[i] >= INF : 0u;
    kind[i] = (plain ^ 1u) + poisoned;
  }
}

}  // namespace fb
