// The functions of layers for one float32 number: the operations of vector.h and cpu_activation.cpp, which compute them
// for vectors, in the same order, so that both give the same bits.
#pragma once
#include "numeric.h"

namespace fb {

// e^x to about 2 units in the last place; vector.h explains the steps.
FB_HD float exponential(float x) {
  constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * 1.44269504f + MAGIC, n = shifted - MAGIC;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const int32_t exponent = int32_t(bits(shifted)) - 0x4b400000, first = exponent >> 1;
  return (p * value(uint32_t(first + 127) << 23)) * value(uint32_t(exponent - first + 127) << 23);
}

FB_HD float sigmoid(float x) { return 1.0f / (exponential(-x) + 1.0f); }

FB_HD float relu(float x) { return x < 0.0f ? 0.0f : x; }  // NaN stays NaN

// For a normally distributed value x: e^(-x²/2), and the probability of a value below x (see cpu_activation.cpp).
struct Normal {
  float density, below;
};
FB_HD Normal normal(float x) {
  const float size = x < 0.0f ? -x : x, density = exponential((size * size) * -0.5f), t = 1.0f / (size * 0.35f + 1.0f);
  float sum = t * -2.914613938e-02f + 1.439727070e-01f;
  sum = sum * t + -2.557163190e-01f;
  sum = sum * t + 1.591764911e-01f;
  sum = sum * t + -2.311141730e-02f;
  sum = sum * t + 1.055086629e-01f;
  sum = sum * t + 1.198327039e-01f;
  sum = sum * t + 1.398618918e-01f;
  sum = sum * t + 1.396214031e-01f;
  const float beyond = density * (t * sum);
  return Normal{density, x < 0.0f ? beyond : 1.0f - beyond};
}

}  // namespace fb
