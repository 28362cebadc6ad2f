// The types of values that threads accumulate for the parts of a matrix, for Gathering in tile.cuh.
#pragma once
#include "tile.cuh"

namespace fb {

struct Maximum {
  typedef uint32_t *Target;
  uint32_t top;  // float32 bits
  FB_D void join(const Maximum &m) { top = larger(top, m.top); }
  FB_D Maximum shuffled(int distance) const { return Maximum{__shfl_xor_sync(ALL, top, distance)}; }
  FB_D void hand_in(Target to, int64_t part) const { atomicMax(to + part, top); }
};

struct Extent {
  struct Target {
    uint32_t *top, *bottom;
  };
  // missing: (bits of infinity) - (bits of the smallest magnitude), so it is a maximum with neutral element 0, like
  // top.
  uint32_t top, missing;
  FB_D void take(uint32_t magnitude) {
    top = larger(top, magnitude);
    if (magnitude && magnitude < INF) missing = larger(missing, INF - magnitude);
  }
  FB_D void join(const Extent &e) { top = larger(top, e.top), missing = larger(missing, e.missing); }
  FB_D Extent shuffled(int distance) const {
    return Extent{__shfl_xor_sync(ALL, top, distance), __shfl_xor_sync(ALL, missing, distance)};
  }
  FB_D void hand_in(const Target &to, int64_t part) const {
    atomicMax(to.top + part, top);
    atomicMin(to.bottom + part, INF - missing);
  }
};

struct Weighed {  // a sum of `four_less_six` (element.h)
  typedef int64_t *Target;
  int64_t sum;
  FB_D void join(const Weighed &w) { sum += w.sum; }
  FB_D Weighed shuffled(int d) const {
    uint64_t high = __shfl_xor_sync(ALL, uint32_t(uint64_t(sum) >> 32), d),
             low = __shfl_xor_sync(ALL, uint32_t(sum), d);
    return Weighed{int64_t(high << 32 | low)};
  }
  FB_D void hand_in(Target to, int64_t part) const {
    atomicAdd((unsigned long long *)to + part, (unsigned long long)sum);
  }
};

struct Counts {  // statistics of at most 2^15 elements, so that one word can contain two counts of 16 bits
  struct Target {
    int64_t *tally;
    uint32_t *amax;
  };
  uint64_t error;
  uint32_t nonzero, kept;  // the elements with x != 0, and with y != 0: each word has two counts, which are added later
  uint32_t saturated_capped, nonfinite_lost, top;

  FB_D void count(float was, float back, bool overflowed) {
    bool capped, some = was != 0.0f;
    uint32_t units = error_units(was, back, &capped);
    error += some ? units : 0;
    nonzero += some, kept += some && back != 0.0f;
    saturated_capped += uint32_t(overflowed && back != 0.0f) | uint32_t(capped) << 16;
    nonfinite_lost += uint32_t(!finite(was)) | uint32_t(!finite(back)) << 16;
    top = larger(top, bits(was) & MAGNITUDE);
  }
  FB_D void join(const Counts &c) {
    error += c.error, nonzero += c.nonzero, kept += c.kept, saturated_capped += c.saturated_capped;
    nonfinite_lost += c.nonfinite_lost, top = larger(top, c.top);
  }
  FB_D Counts shuffled(int d) const {
    uint64_t high = __shfl_xor_sync(ALL, uint32_t(error >> 32), d), low = __shfl_xor_sync(ALL, uint32_t(error), d);
    return Counts{high << 32 | low,
                  __shfl_xor_sync(ALL, nonzero, d),
                  __shfl_xor_sync(ALL, kept, d),
                  __shfl_xor_sync(ALL, saturated_capped, d),
                  __shfl_xor_sync(ALL, nonfinite_lost, d),
                  __shfl_xor_sync(ALL, top, d)};
  }
  FB_D void hand_in(const Target &to, int64_t part) const {
    const uint32_t some = (nonzero & 0xffffu) + (nonzero >> 16), left = (kept & 0xffffu) + (kept >> 16);
    uint64_t each[7] = {error,
                        some,
                        some - left,
                        saturated_capped & 0xffffu,
                        saturated_capped >> 16,
                        nonfinite_lost & 0xffffu,
                        nonfinite_lost >> 16};
#pragma unroll
    for (int i = 0; i < 7; i++)
      if (each[i]) atomicAdd((unsigned long long *)to.tally + 7 * part + i, (unsigned long long)each[i]);
    atomicMax(to.amax + part, top);
  }
};

}  // namespace fb
