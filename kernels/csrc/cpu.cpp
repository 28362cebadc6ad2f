// The entry points of the CPU backend for quantization, extents (largest and smallest magnitudes) and decisions.
#include <algorithm>
#include <vector>
#include "decisions.h"
#include "element.h"
#include "parallel.h"
#include "request.h"

namespace fb {

// Each dtype is compiled in its own unit (cpu_bf16.cpp and so on), because it takes longer to compile than this file.
template <class D>
void quantize(const void *x, int64_t rows, int64_t cols, const Request *requests, int n, int threads);

// Compute the largest and the smallest non-zero magnitude of each R x C part, as float32 bits. The smallest is infinity
// if all elements of a part are zero.
template <class D>
void extent(const void *x, int64_t rows, int64_t cols, int64_t R, int64_t C, uint32_t *amax, uint32_t *amin,
            int threads) {
  int64_t across = (cols + C - 1) / C;
  in_parallel(rows, threads, [&](int64_t count) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < count; r++)
      for (int64_t b = 0; b < across; b++) {
        const Cell<D> *line = (const Cell<D> *)x + r * cols;
        Cell<D> largest = 0, smallest = D::inf;
        for (int64_t c = b * C; c < std::min(cols, (b + 1) * C); c++) {
          Cell<D> m = line[c] & D::magnitude_mask;
          Cell<D> some = m ? m : Cell<D>(D::inf);
          largest = m > largest ? m : largest, smallest = some < smallest ? some : smallest;
        }
        raise_to(&amax[r / R * across + b], float_bits<D>(largest));
        lower_to(&amin[r / R * across + b], float_bits<D>(smallest));
      }
  });
}

// Set `worse` of each R x C part to 0 if the error of the values `mine` is below that of `other`, otherwise to 1.
template <class D>
void compare(const void *x, const void *mine, const void *other, int64_t rows, int64_t cols, int64_t R, int64_t C,
             uint32_t select, uint8_t *worse, int threads) {
  Ieee ieee;
  const int64_t across = (cols + C - 1) / C;
  in_parallel((rows + R - 1) / R, threads, [&](int64_t count) {
    std::vector<uint32_t> amax;
    std::vector<int64_t> sums;
#pragma omp for schedule(static)
    for (int64_t p = 0; p < count; p++) {
      const int64_t end = std::min(rows, (p + 1) * R);
      auto each_part = [&](const void *of, int64_t r, auto f) {
        for (int64_t b = 0; b < across; b++)
          f(size_t(b), (const Cell<D> *)of + r * cols, b * C, std::min(cols, (b + 1) * C));
      };
      amax.assign(size_t(across), 0), sums.assign(size_t(across), 0);
      for (int64_t r = p * R; r < end; r++)
        each_part(x, r, [&](size_t b, const Cell<D> *line, int64_t c, int64_t stop) {
          Cell<D> m = 0;
          for (; c < stop; c++) m = std::max(m, Cell<D>(line[c] & D::magnitude_mask));
          amax[b] = std::max(amax[b], float_bits<D>(m));
        });
      for (int64_t r = p * R; r < end; r++) {
        const Cell<D> *own = (const Cell<D> *)mine + r * cols, *its = (const Cell<D> *)other + r * cols;
        each_part(x, r, [&](size_t b, const Cell<D> *line, int64_t c, int64_t stop) {
          const float top = value(amax[b]);
          int64_t sum = sums[b];
          for (; c < stop; c++) {
            const float v = D::widen(line[c]);
            const int32_t first = units_of(magnitude(v - D::widen(own[c])) / top, select);
            const int32_t second = units_of(magnitude(v - D::widen(its[c])) / top, select);
            sum = joined(select, sum, compared(select, first, second));
          }
          sums[b] = sum;
        });
      }
      for (int64_t b = 0; b < across; b++) worse[p * across + b] = !prefers_four(select, sums[size_t(b)]);
    }
  });
}

// Apply a mixture entry's test to every decision block, and return the number of blocks that are still undecided.
inline int64_t decide(const DecideCall &call, int threads) {
  int64_t undecided = 0;
  in_parallel(call.blocks, threads, [&](int64_t count) {
    int64_t own = 0;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) own += !decide_block(call, i);
    __atomic_fetch_add(&undecided, own, __ATOMIC_RELAXED);
  });
  return undecided;
}

}  // namespace fb

extern "C" {

void fb_quantize(const void *x, int dtype, int64_t rows, int64_t cols, const fb::Request *requests, int n,
                 int threads) {
  fb::with_dtype(dtype, [&](auto d) { fb::quantize<decltype(d)>(x, rows, cols, requests, n, threads); });
}

int64_t fb_decide(const fb::DecideCall *call, int threads) { return fb::decide(*call, threads); }

void fb_compare(const void *x, int dtype, int64_t rows, int64_t cols, const void *mine, const void *other, int64_t R,
                int64_t C, uint32_t select, uint8_t *worse, int threads) {
  fb::with_dtype(dtype,
                 [&](auto d) { fb::compare<decltype(d)>(x, mine, other, rows, cols, R, C, select, worse, threads); });
}

// The caller has filled amin with infinity and amax with 0.
void fb_extent(const void *x, int dtype, int64_t rows, int64_t cols, int64_t R, int64_t C, uint32_t *amax,
               uint32_t *amin, int threads) {
  fb::with_dtype(dtype, [&](auto d) { fb::extent<decltype(d)>(x, rows, cols, R, C, amax, amin, threads); });
}
}
