// The plain twins of the GPU instructions that the kernels use, applied to arrays.
#include "simt.h"

#include "tile.cuh"

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
