// Philox4x32-10 (Salmon et al. 2011): counter-based random bits. The counter consists of a number that is computed from
// the element's index, and a stream; the key is the seed. So an element's bits do not depend on threads, order or
// launch shape.
#pragma once
#include "numeric.h"

namespace fb {

// Streams make the uses of one seed independent of each other.
enum Stream { ROUND_HIGH = 0, ROUND_LOW = 1, NOISE = 2, SIGNS = 3 };

constexpr int PHILOX_ROUNDS = 10;
constexpr uint32_t PHILOX_FACTOR_0 = 0xD2511F53u, PHILOX_FACTOR_1 = 0xCD9E8D57u;  // below: the steps of the key
constexpr uint32_t PHILOX_STEP_0 = 0x9E3779B9u, PHILOX_STEP_1 = 0xBB67AE85u;

struct Words {
  uint32_t w[4];
};

FB_HD uint32_t high_product(uint32_t a, uint32_t b) { return uint32_t((uint64_t(a) * b) >> 32); }

FB_HD Words philox(uint64_t index, uint32_t stream, uint64_t seed) {
  uint32_t c0 = uint32_t(index), c1 = uint32_t(index >> 32), c2 = stream, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < PHILOX_ROUNDS; round++) {
    uint32_t h0 = high_product(PHILOX_FACTOR_0, c0), l0 = PHILOX_FACTOR_0 * c0;
    uint32_t h1 = high_product(PHILOX_FACTOR_1, c2), l1 = PHILOX_FACTOR_1 * c2;
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += PHILOX_STEP_0;
    k1 += PHILOX_STEP_1;
  }
  return Words{{c0, c1, c2, c3}};
}

// The random bits for the stochastic rounding of element i: 16 bits of the output for counter i / 8 and, if they do not
// decide, 32 bits of the output for counter i / 4 in another stream.
FB_HD uint32_t rounding_high(uint64_t element, uint64_t seed) {
  Words r = philox(element >> 3, ROUND_HIGH, seed);
  return (r.w[(element >> 1) & 3] >> (16 * (element & 1))) & 0xffffu;
}
FB_HD uint32_t rounding_low(uint64_t element, uint64_t seed) {
  return philox(element >> 2, ROUND_LOW, seed).w[element & 3];
}

}  // namespace fb
