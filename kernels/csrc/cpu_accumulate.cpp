// The entry points of products with a chosen accumulator for the CPU backend.
#include "accumulate.h"
#include <vector>
#include "parallel.h"

namespace {

using namespace fb;

// REGISTER columns of b, one for each lane of a vector: for every k, the parted values (accumulate.h).
struct Columns {
  std::vector<FloatLanes> significands;
  std::vector<IntLanes> exponents;
  bool special = false;

  Columns(const float *b, int64_t first, int64_t N, int64_t K, int emin) : significands(K), exponents(K) {
    for (int64_t k = 0; k < K; k++)
      for (int j = 0; j < REGISTER; j++) {
        Parted p = parted(first + j < N ? b[k * N + first + j] : 0.0f, emin);
        special |= !finite(p.significand);
        significands[k][j] = p.significand;
        exponents[k][j] = p.exponent;
      }
  }
  // For sums in a format: `significands` are the values themselves.
  Columns(const float *b, int64_t first, int64_t N, int64_t K) : significands(K) {
    for (int64_t k = 0; k < K; k++)
      for (int j = 0; j < REGISTER; j++) significands[k][j] = first + j < N ? b[k * N + first + j] : 0.0f;
  }
};

std::vector<Parted> rows_of(const float *a, int64_t count, int emin) {
  std::vector<Parted> rows(count);
  for (int64_t i = 0; i < count; i++) rows[i] = parted(a[i], emin);
  return rows;
}

void store(FloatLanes c, float *out, int64_t first, int64_t N) {
  for (int j = 0; j < REGISTER && first + j < N; j++) out[first + j] = c[j];
}

}  // namespace

extern "C" {

// Compute c (M x N) = a (M x K) · b (K x N), all contiguous float32, with the fused accumulator that `how` describes.
// a_emin and b_emin are the exponents of the smallest normal values of the operands' formats.
void fb_accumulate(const float *a, int a_emin, const float *b, int b_emin, int64_t M, int64_t N, int64_t K,
                   const Fused *how, float *c, int threads) {
  std::vector<Parted> rows = rows_of(a, M * K, a_emin);
  std::vector<char> special(M);
  for (int64_t i = 0; i < M; i++)
    for (int64_t k = 0; k < K; k++) special[i] |= !finite(a[i * K + k]);
  bool wide = how->fraction > 20;
  int64_t tiles = (N + REGISTER - 1) / REGISTER;
  in_parallel(tiles, threads, [&](int64_t count) {
#pragma omp for
    for (int64_t t = 0; t < count; t++) {
      Columns columns(b, t * REGISTER, N, K, b_emin);
      for (int64_t i = 0; i < M; i++) {
        auto sum = wide ? fused_sum<true> : fused_sum<false>;
        bool any = special[i] || columns.special;
        store(sum(&rows[i * K], columns.significands.data(), columns.exponents.data(), K, any, *how), c + i * N,
              t * REGISTER, N);
      }
    }
  });
}

// Compute c (M x N) = a (M x K) · b (K x N), all contiguous float32, by a sum in a format.
void fb_accumulate_in_format(const float *a, const float *b, int64_t M, int64_t N, int64_t K, int format, float *c,
                             int threads) {
  auto sums = format == SUM_FP16 ? sums_in<SUM_FP16> : format == SUM_BF16 ? sums_in<SUM_BF16> : sums_in<SUM_FP32>;
  int64_t tiles = (N + REGISTER - 1) / REGISTER;
  in_parallel(tiles, threads, [&](int64_t count) {
#pragma omp for
    for (int64_t t = 0; t < count; t++) {
      Columns columns(b, t * REGISTER, N, K);
      for (int64_t i = 0; i < M; i += AT_ONCE) {
        const float *rows[AT_ONCE];
        FloatLanes sum[AT_ONCE];
        for (int r = 0; r < AT_ONCE; r++) rows[r] = a + (i + r < M ? i + r : M - 1) * K;
        sums(rows, columns.significands.data(), K, sum);
        for (int r = 0; r < AT_ONCE && i + r < M; r++) store(sum[r], c + (i + r) * N, t * REGISTER, N);
      }
    }
  });
}

// Compute c (M x N) = a (M x K) · b (K x N) of E2M1 values whose groups of `group` along K have the scales a_scales
// (M x K / group) and b_scales (K / group x N). K is a multiple of the group.
void fb_accumulate_groups(const float *a, const float *a_scales, int a_emin, const float *b, const float *b_scales,
                          int b_emin, int64_t M, int64_t N, int64_t K, int group, const Fused *how, float *c,
                          int threads) {
  int64_t groups = K / group, in_block = how->length / group, tiles = (N + REGISTER - 1) / REGISTER;
  std::vector<Parted> row_scales = rows_of(a_scales, M * groups, a_emin);
  in_parallel(tiles, threads, [&](int64_t count) {
    std::vector<Group> terms(REGISTER * groups);
#pragma omp for
    for (int64_t t = 0; t < count; t++) {
      Columns columns(b, t * REGISTER, N, K), scales(b_scales, t * REGISTER, N, groups, b_emin);
      for (int64_t i = 0; i < M; i++) {
        for (int64_t g = 0; g < groups; g++) {
          FloatLanes p{};
          for (int64_t k = g * group; k < (g + 1) * group; k++) p += columns.significands[k] * a[i * K + k];
          Parted scale = row_scales[i * groups + g];
          p *= scales.significands[g] * scale.significand;
          IntLanes e = scales.exponents[g] + scale.exponent;
          for (int j = 0; j < REGISTER; j++) terms[j * groups + g] = {p[j], e[j]};
        }
        FloatLanes sum{};
        for (int j = 0; j < REGISTER; j++)
          for (int64_t g = 0; g < groups; g += in_block)
            sum[j] = grouped_block(&terms[j * groups + g], int(groups - g < in_block ? groups - g : in_block), sum[j],
                                   how->fraction, how->kept);
        store(sum, c + i * N, t * REGISTER, N);
      }
    }
  });
}
}
