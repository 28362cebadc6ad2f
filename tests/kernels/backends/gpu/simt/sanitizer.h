// ThreadSanitizer on the emulator. With -fsanitize=thread, each thread of a CTA is a fiber of the sanitizer, which
// reports two accesses to the same memory, one of them a store, that the kernel does not order. Only barriers order
// the accesses of threads, and nothing orders those of CTAs. Atomic operations do not race, but they order nothing;
// neither do shuffles. The emulator's own functions are UNCHECKED, because their order is that of the host.
#pragma once
#include <stddef.h>

#ifdef __SANITIZE_THREAD__
#define UNCHECKED __attribute__((no_sanitize("thread"), noinline))
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void *fiber);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *at);
void __tsan_release(void *at);
void __tsan_java_init(unsigned long start, unsigned long size);
void __tsan_java_alloc(unsigned long start, unsigned long size);
}
#else
#define UNCHECKED
#endif

namespace simt::sanitizer {

#ifdef __SANITIZE_THREAD__
inline void *host() { return __tsan_get_current_fiber(); }
inline void *created() { return __tsan_create_fiber(0); }  // what the host did before comes before the fiber
inline void destroy(void *fiber) { __tsan_destroy_fiber(fiber); }
inline void go_to(void *fiber) { __tsan_switch_to_fiber(fiber, 1); }  // 1: the switch orders nothing
inline void acquire(void *at) { __tsan_acquire(at); }
inline void release(void *at) { __tsan_release(at); }
// Forget all accesses to this memory: it is that of a new CTA. The functions for Java's heap are the only ones of the
// sanitizer that do this.
UNCHECKED inline void renew(void *start, size_t size) {
  static bool initialised;
  if (!initialised) __tsan_java_init(1 << 20, 0x7fffffffff00ul), initialised = true;
  const unsigned long first = (unsigned long)start / 16 * 16, end = ((unsigned long)start + size + 15) / 16 * 16;
  if (size) __tsan_java_alloc(first, end - first);
}
#else
inline void *host() { return nullptr; }
inline void *created() { return nullptr; }
inline void destroy(void *) {}
inline void go_to(void *) {}
inline void acquire(void *) {}
inline void release(void *) {}
inline void renew(void *, size_t) {}
#endif

}  // namespace simt::sanitizer
