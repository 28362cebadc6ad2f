// Computes the scales of a row of blocks on the CPU, and which loop has to process each block (Care).
#pragma once
#include "ordinary.h"

namespace fb {

// ORDINARY blocks can take the fast loops; CAREFUL ones are processed element by element; POISONED ones become NaN.
enum Care : uint32_t { ORDINARY = 0, CAREFUL = 1, POISONED = 2 };

// The scales of n blocks, as arrays so that the loop vectorises. A block whose scale is stored as 0 becomes zeros; it
// gets the encode factor 0, so that the fast loops can process it.
struct BlockScales {
  float *encode, *decode;
  uint32_t *code, *care;
};
// group, expansion: functions that return the second-level value of block i, and the factor of its scale, which Four
// Over Six chooses. SELECTS: the scaling has a Select other than DEFAULT.
template <ScalingKind KIND, bool SELECTS, class GroupOf, class Expansion>
void scales(const Scaling &scaling, const uint32_t *amax, int64_t n, float max, GroupOf group, const Bounds &bounds,
            const BlockScales &to, Expansion expansion) {
  Scaling s = scaling;
  s.kind = KIND;
  if (!SELECTS) s.select = Select::DEFAULT;  // a constant, so that the loop has no division for the other order
  const Bounds ordinary = bounds;
  const uint32_t *__restrict from = amax;
  float *__restrict encode = to.encode, *__restrict decode = to.decode;
  uint32_t *__restrict code = to.code, *__restrict care = to.care;
  for (int64_t i = 0; i < n; i++) {
    Scale one = make_scale(s, max, value(from[i]), group(i), expansion(i));
    const bool zeros = KIND == TWO_LEVEL && (one.code == 0) & (value(from[i]) <= ordinary.most);
    encode[i] = zeros ? 0.0f : one.encode, decode[i] = one.decode, code[i] = one.code;
    uint32_t plain = uint32_t(is_ordinary(s, value(from[i]), one, ordinary)) | uint32_t(zeros);
    care[i] = (plain ^ 1u) + (KIND != NONE ? from[i] >= INF : 0u);
  }
}

}  // namespace fb
