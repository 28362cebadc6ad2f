// An emulator of the part of CUDA's execution model that the kernels use, on one CPU thread. Tests run the unmodified
// sources of the kernels on it.
//
// Each thread of a CTA is a fiber. A fiber runs until it must wait for other threads, at a barrier or a shuffle, and
// then the next fiber runs. If a wait cannot end, because a thread never comes to the barrier or shuffle, the emulator
// aborts with a message. So divergence that hangs a GPU, or is undefined there, is detected.
//
// The seed `shuffle` determines the order of threads and CTAs. Tests change it for every launch, so results that depend
// on the order, for example because a barrier is missing, change too. Compiled with -fsanitize=thread, the emulator
// also reports races that change no result (sanitizer.h); the barrier that `removed` names is then left out, to test
// this.
//
// Static shared memory is the library's thread-local segment, which contains nothing else. It and the dynamic shared
// memory are filled with a pattern before each CTA, because a GPU does not clear them either. Dynamic shared memory has
// the size that the launch asks for; a store shortly behind its end is reported.
#pragma once
#define FB_SIMT
#define __shared__ static thread_local
#include <link.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "sanitizer.h"

namespace simt {

struct Dim {
  unsigned x;
};
inline Dim thread, block, grid;

constexpr int WARP = 32, MAX_THREADS = 1024;
constexpr size_t STACK = 128 << 10;
// Under the sanitizer: the bytes of a stack that kernels use, and the number of its fibers, of which it allows 8,128.
constexpr size_t CHECKED_STACK = 16 << 10, MOST_CHECKED = 4096;

struct Fiber {
  void *stack_pointer;
  bool done;
  void *checked;  // the sanitizer's fiber
};
struct Meeting {  // a barrier for the lanes of a warp or for all threads of a CTA
  int expected, arrived;
  unsigned turn;
  uint32_t said[2][WARP];
};

inline Fiber fibers[MAX_THREADS];
inline void *main_stack_pointer;
inline char *stacks;
inline Meeting warps[MAX_THREADS / WARP], everyone;
inline int threads, running;
inline void *host;                    // the sanitizer's fiber that called `run`
inline char ended, barrier_turns[2];  // the sanitizer orders threads by these addresses
inline long idle;                     // how many times in a row a fiber found that it still has to wait
inline const std::function<void()> *body;

// An order of the numbers below `count`: first, first + stride, first + 2 stride, ... modulo count.
struct Order {
  unsigned first, stride, count;
  unsigned operator()(unsigned turn) const { return unsigned((first + uint64_t(turn) * stride) % count); }
};
inline Order order_of(uint64_t seed, unsigned count) {  // seed 0: numeric order
  uint64_t mixed = seed * 0x9e3779b97f4a7c15ull;
  unsigned stride = seed ? unsigned(mixed >> 32) % count : 1;
  while (std::gcd(stride, count) != 1) stride++;
  return Order{unsigned(mixed & 0xffffffffu) % count, stride, count};
}
inline uint64_t shuffle;
inline uint64_t atomics;  // the number of atomic operations of all threads so far
inline Order thread_order;

// Save the callee-saved registers on the stack, store the stack pointer in *from, and continue with the stack `to`.
extern "C" void simt_switch(void **from, void *to);
#ifdef __x86_64__
asm(R"(
.text
.globl simt_switch
simt_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl simt_switch
simt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "fibers need a few lines of assembly for this processor"
#endif

[[noreturn]] inline void fail(const char *what) {
  fprintf(stderr, "simt: %s (thread %u of block %u)\n", what, thread.x, block.x);
  abort();
}

UNCHECKED inline void go_to(int next) {
  int from = running;
  running = next;
  thread.x = unsigned(next);
  sanitizer::go_to(fibers[next].checked);
  simt_switch(&fibers[from].stack_pointer, fibers[next].stack_pointer);
}
UNCHECKED inline void let_others_run() {
  int next = running;
  do next = int((unsigned(next) + thread_order.stride) % unsigned(threads));
  while (fibers[next].done && next != running);
  if (++idle > 8l * threads) fail("threads wait for some that never come");
  if (next != running) go_to(next);
}
UNCHECKED inline void meet(Meeting &m) {
  unsigned turn = m.turn;
  if (++m.arrived == m.expected) {
    m.arrived = 0, m.turn++, idle = 0;
    return;
  }
  while (m.turn == turn) let_others_run();
}
UNCHECKED inline void enter() {
  (*body)();
  sanitizer::release(&ended);
  fibers[running].done = true;
  idle = 0;
  for (int i = 0; i < threads; i++)
    if (int next = int(thread_order(unsigned(i))); !fibers[next].done) go_to(next);
  void *last;
  sanitizer::go_to(host);
  simt_switch(&last, main_stack_pointer);
}

struct Barrier;
inline std::vector<Barrier *> barriers;  // those that a thread has reached
inline std::string removed;              // the name of the barrier that lets all threads pass

struct Barrier {     // a call of __syncthreads in the sources
  std::string name;  // FILE:LINE
  bool waits, reached = false;
  UNCHECKED Barrier(const char *file, int line) {
    const char *slash = strrchr(file, '/');
    name = std::string(slash ? slash + 1 : file) + ":" + std::to_string(line);
    waits = name != removed;
    barriers.push_back(this);
  }
  UNCHECKED void wait() {
    reached = true;
    if (!waits) return;
    char *turn = &barrier_turns[everyone.turn & 1];  // all threads leave a barrier before the next but one
    sanitizer::release(turn);
    meet(everyone);
    sanitizer::acquire(turn);
  }
};

UNCHECKED inline uint32_t shuffled(uint32_t v, int from) {
  int lane = running % WARP;
  Meeting &m = warps[running / WARP];
  uint32_t *said = m.said[m.turn & 1];  // the next meeting uses the other half; a thread is at most one meeting ahead
  said[lane] = v;
  meet(m);
  return said[from < WARP ? from : lane];
}

struct Memory {
  void *start;
  size_t size;
};
inline thread_local char allocated;  // a write to this variable allocates the whole thread-local segment
inline Memory shared_memory() {
  allocated = 1;
  Memory found{nullptr, 0};
  dl_iterate_phdr(
      [](dl_phdr_info *library, size_t, void *found) {
        const void *own = &simt::shuffle;
        bool ours = false;
        size_t size = 0;
        for (int i = 0; i < library->dlpi_phnum; i++) {
          const auto &part = library->dlpi_phdr[i];
          const char *start = (const char *)library->dlpi_addr + part.p_vaddr;
          ours |= part.p_type == PT_LOAD && own >= start && own < start + part.p_memsz;
          if (part.p_type == PT_TLS) size = part.p_memsz;
        }
        if (ours) *(Memory *)found = Memory{library->dlpi_tls_data, size};
        return int(ours);
      },
      &found);
  if (!found.start) fail("the shared memory of this library is unknown");
  return found;
}
constexpr int POISON = 0xa5;

struct Dynamic {  // dynamic shared memory, and behind it a margin that no kernel may change
  static constexpr size_t MARGIN = 4096;
  std::vector<uint64_t> words;
  size_t bytes = 0;
  void resize(size_t size) { bytes = size, words.resize((size + MARGIN) / 8 + 2); }
  char *start() { return (char *)((uintptr_t(words.data()) + 15) / 16 * 16); }
  void poison() { memset(start(), POISON, bytes + MARGIN); }
  void check() {
    for (size_t i = bytes; i < bytes + MARGIN; i++)
      if (start()[i] != char(POISON)) fail("a store beyond the dynamic shared memory");
  }
};
inline Dynamic dynamic;
inline void *dynamic_shared() { return dynamic.start(); }

UNCHECKED inline void run(unsigned blocks, int thread_count, size_t dynamic_bytes,
                          const std::function<void()> &kernel) {
  if (thread_count % WARP || thread_count > MAX_THREADS) fail("threads come in warps, up to 1024");
  if (!stacks) stacks = (char *)aligned_alloc(4096, STACK * MAX_THREADS);
  body = &kernel, threads = thread_count, grid.x = blocks;
  thread_order = order_of(shuffle, unsigned(threads));
  const Memory shared = shared_memory();
  dynamic.resize(dynamic_bytes);
  host = sanitizer::host();
  std::vector<void *> used;  // the sanitizer's fibers of earlier CTAs
  for (unsigned turn = 0; turn < blocks; turn++) {
    sanitizer::renew(shared.start, shared.size);
    sanitizer::renew(dynamic.start(), dynamic_bytes + Dynamic::MARGIN);
    memset(shared.start, POISON, shared.size);
    dynamic.poison();
    block.x = order_of(shuffle, blocks)(turn), idle = 0;
    everyone = Meeting{threads, 0, 0, {}};
    for (int w = 0; w < threads / WARP; w++) warps[w] = Meeting{WARP, 0, 0, {}};
    for (int i = 0; i < threads; i++) {
      void **top = (void **)(stacks + STACK * size_t(i + 1)) - 3;  // misaligned by 8 from 16, as at function entry
#ifdef __x86_64__
      *top = nullptr, *--top = (void *)enter;
      top -= 6;
#else
      top = (void **)((char *)top - 8) - 20;
      top[11] = (void *)enter;
#endif
      sanitizer::renew(stacks + STACK * size_t(i + 1) - CHECKED_STACK, CHECKED_STACK);
      fibers[i] = Fiber{top, false, sanitizer::created()};
      used.push_back(fibers[i].checked);
    }
    thread.x = thread_order.first, running = int(thread.x);
    sanitizer::go_to(fibers[running].checked);
    simt_switch(&main_stack_pointer, fibers[running].stack_pointer);
    dynamic.check();
    if (used.size() > MOST_CHECKED) {
      for (void *fiber : used) sanitizer::destroy(fiber);
      used.clear();
    }
  }
  sanitizer::acquire(&ended);
  for (void *fiber : used) sanitizer::destroy(fiber);
}

}  // namespace simt

#define threadIdx simt::thread
#define blockIdx simt::block
#define gridDim simt::grid

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
template <class T> inline T __ldcs(const T *p) {
  if (uintptr_t(p) % sizeof(T)) simt::fail("a load that is not aligned to its size");
  return *p;
}
template <class T> inline T __ldca(const T *p) { return __ldcs(p); }
template <class T> inline void __stcs(T *p, T v) {
  if (uintptr_t(p) % sizeof(T)) simt::fail("a store that is not aligned to its size");
  *p = v;
}
#define __syncthreads()                               \
  [] {                                                \
    static simt::Barrier barrier(__FILE__, __LINE__); \
    barrier.wait();                                   \
  }()
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t v, int d) {
  return simt::shuffled(v, simt::running % simt::WARP ^ d);
}
inline float __shfl_xor_sync(uint32_t mask, float v, int d) {
  uint32_t u;
  memcpy(&u, &v, 4);
  u = __shfl_xor_sync(mask, u, d);
  memcpy(&v, &u, 4);
  return v;
}
inline float __shfl_down_sync(uint32_t, float v, int d) {
  uint32_t u;
  memcpy(&u, &v, 4);
  u = simt::shuffled(u, simt::running % simt::WARP + d);
  memcpy(&v, &u, 4);
  return v;
}
// Return a + b rounded toward zero. The exact sum is `sum` + `rest` (Knuth's TwoSum).
inline float __fadd_rz(float a, float b) {
  float sum = a + b, from_b = sum - a, rest = (a - (sum - from_b)) + (b - from_b);
  uint32_t u;
  memcpy(&u, &sum, 4);
  u -= sum > 0 ? rest < 0 : rest > 0;
  memcpy(&sum, &u, 4);
  return sum;
}
// Return four of the eight bytes of b and a. The four lower hexadecimal digits of `which` are their indices: 0 to 3 in
// a, 4 to 7 in b.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t which) {
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= uint32_t((uint64_t(b) << 32 | a) >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
// Return the larger of each pair of unsigned 16-bit halves.
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a : b, high = (a >> 16) > (b >> 16) ? a : b;
  return (low & 0xffffu) | (high & 0xffff0000u);
}
// Return the smaller of each pair of unsigned 16-bit halves.
inline uint32_t __vminu2(uint32_t a, uint32_t b) { return a ^ b ^ __vmaxu2(a, b); }
UNCHECKED inline void count_atomic() { simt::atomics++; }
inline void atomicMax(uint32_t *p, uint32_t v) {
  count_atomic();
  if (__atomic_load_n(p, __ATOMIC_RELAXED) < v) __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline void atomicMax(unsigned long long *p, unsigned long long v) {
  count_atomic();
  if (__atomic_load_n(p, __ATOMIC_RELAXED) < v) __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline void atomicMin(uint32_t *p, uint32_t v) {
  count_atomic();
  if (__atomic_load_n(p, __ATOMIC_RELAXED) > v) __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline void atomicAdd(unsigned long long *p, unsigned long long v) {
  count_atomic();
  __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
