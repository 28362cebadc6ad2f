// Runs loops of the CPU backend on several threads. No result depends on the number of threads.
#pragma once
#include <stdint.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace fb {

// While this object exists, subnormals are kept and rounding is to nearest, even if the calling program has set another
// mode. The destructor restores the program's mode.
struct Ieee {
#ifdef __SSE2__
  unsigned before = _mm_getcsr();
  Ieee() { _mm_setcsr(0x1f80); }
  ~Ieee() {
    _mm_sfence();  // makes streaming stores visible to other threads
    _mm_setcsr(before);
  }
#endif
};

// Run `work` on every thread; `work` divides `count` pieces among threads with `#pragma omp for`.
template <class F> void in_parallel(int64_t count, int threads, F work) {
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
  {
    Ieee ieee;
    work(count);
  }
}

}  // namespace fb
