// Threads of the CPU backend. No result depends on how many there are.
#pragma once
#include <stdint.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace fb {

// While it lives, subnormals count and rounding is to nearest, whatever the calling program has set.
struct Ieee {
#ifdef __SSE2__
  unsigned before = _mm_getcsr();
  Ieee() { _mm_setcsr(0x1f80); }
  ~Ieee() {
    _mm_sfence();  // streaming stores are seen by whoever comes next
    _mm_setcsr(before);
  }
#endif
};

// Runs `work` on every thread; it shares out `count` pieces with `#pragma omp for`.
template <class F> void in_parallel(int64_t count, int threads, F work) {
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
  {
    Ieee ieee;
    work(count);
  }
}

}  // namespace fb
