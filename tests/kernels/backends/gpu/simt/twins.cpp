// The C++ code that replaces GPU instructions in the emulator, applied to arrays of n elements.
#include "simt.h"

#include "arithmetic.cuh"

extern "C" void widen_fp16(int n, const uint16_t *from, float *to) {
  for (int i = 0; i < n; i++) to[i] = fb::Fp16::widen(from[i]);
}
extern "C" void narrow_bf16(int n, const float *from, uint32_t *to) {
  for (int i = 0; i < n; i += 2) to[i / 2] = fb::narrow_two<fb::Bf16>(from[i], from[i + 1]);
}
extern "C" void narrow_fp16(int n, const float *from, uint32_t *to) {
  for (int i = 0; i < n; i += 2) to[i / 2] = fb::narrow_two<fb::Fp16>(from[i], from[i + 1]);
}
extern "C" void larger_halves(int n, const uint32_t *a, const uint32_t *b, uint32_t *to) {
  for (int i = 0; i < n; i++) to[i] = __vmaxu2(a[i], b[i]);
}
extern "C" void smaller_halves(int n, const uint32_t *a, const uint32_t *b, uint32_t *to) {
  for (int i = 0; i < n; i++) to[i] = __vminu2(a[i], b[i]);
}
extern "C" void add_toward_zero(int n, const float *a, const float *b, float *to) {
  for (int i = 0; i < n; i++) to[i] = __fadd_rz(a[i], b[i]);
}

// Compare functions of arithmetic.cuh with the slower ones that they replace: to[i] is 1 if results for element i
// differ.
extern "C" void different_draws(int n, const int64_t *index, const int64_t *seed, uint8_t *to) {
  for (int i = 0; i < n; i++) {
    const fb::Words a = fb::wide_philox(uint64_t(index[i]), fb::ROUND_HIGH, uint64_t(seed[i]));
    const fb::Words b = fb::philox(uint64_t(index[i]), fb::ROUND_HIGH, uint64_t(seed[i]));
    to[i] = memcmp(&a, &b, sizeof(a)) != 0;
  }
}
// Each magnitude v[i] is rounded with the draws around its threshold, and with the least and the greatest draw.
extern "C" void different_roundings(int n, const float *v, const fb::GridWords *words, uint8_t *to) {
  const fb::Grid g = words->grid();
  for (int i = 0; i < n; i++) {
    to[i] = 0;
    const uint32_t near = fb::threshold(fb::draw<false>(v[i], g));
    for (uint32_t high : {near - 1, near, near + 1, 0u, 0xffffu}) {
      uint32_t ask = 0;
      bool asks[2] = {false, false};
      const float want = fb::rounded_at_once<false, true>(v[i], g, high & 0xffffu, &ask);
      const float lower = fb::drawn<false>(v[i], g, 0x55550000u | (high & 0xffffu), &asks[0]);
      const float upper = fb::drawn<true>(v[i], g, high << 16 | 0x5555u, &asks[1]);
      to[i] |= fb::bits(lower) != fb::bits(want) || fb::bits(upper) != fb::bits(want) || asks[0] != !!ask ||
               asks[1] != !!ask;
    }
  }
}
