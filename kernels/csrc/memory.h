// Updates of results that threads share, and streaming stores, for the CPU backend.
#pragma once
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif
#include "lanes.h"

namespace fb {

template <class D> using Cell = typename D::Storage;
template <class D> uint32_t float_bits(Cell<D> s) { return bits(D::widen(s)); }

inline void raise_to(uint32_t *target, uint32_t v) {  // atomic maximum
  uint32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (seen < v && !__atomic_compare_exchange_n(target, &seen, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
inline void lower_to(uint32_t *target, uint32_t v) {  // atomic minimum
  uint32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (seen > v && !__atomic_compare_exchange_n(target, &seen, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
inline void add_to(Tally *target, const Tally &t) {
  const int64_t *from = &t.error;
  int64_t *to = &target->error;
  for (int i = 0; i < int(sizeof(Tally) / sizeof(int64_t)); i++) __atomic_fetch_add(to + i, from[i], __ATOMIC_RELAXED);
}

// True if a result is too large for the caches (above 16 MiB), so that its stores should bypass them.
template <class D> bool exceeds_caches(int64_t rows, int64_t cols) {
  return double(rows) * double(cols) * sizeof(Cell<D>) > double(16 << 20);
}
// Copy bytes to a result. With `around`, the stores of an aligned run bypass the caches, because ordinary stores would
// first read the cache lines that they overwrite.
inline void put(void *to, const void *from, size_t bytes, bool around) {
#ifdef __AVX512F__
  if (around && !(bytes % 64) && !(uintptr_t(to) % 64)) {
    for (size_t i = 0; i < bytes; i += 64)
      _mm512_stream_si512((__m512i *)((char *)to + i), _mm512_loadu_si512((const char *)from + i));
    return;
  }
#elif defined(__SSE2__)
  if (around && !(bytes % 16) && !(uintptr_t(to) % 16)) {
    for (size_t i = 0; i < bytes; i += 16)
      _mm_stream_si128((__m128i *)((char *)to + i), _mm_loadu_si128((const __m128i *)((const char *)from + i)));
    return;
  }
#endif
  (void)around;
#ifdef __AVX512F__  // runs are short, so a call of memcpy would take longer than the copy
  for (; bytes >= 64; to = (char *)to + 64, from = (const char *)from + 64, bytes -= 64)
    _mm512_storeu_si512(to, _mm512_loadu_si512(from));
  if (!bytes) return;
#endif
  memcpy(to, from, bytes);
}

}  // namespace fb
