"""Test shortcuts of the C++ code in separate C++ programs: tensors of the usual test sizes would miss their errors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fewbits.kernels.backends import build, compilation

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")

DIVISION = """
#include "scale.h"
#include <cstdio>
#include <vector>
using namespace fb;

// The number of wrong quotients, compared with the processor's division, among n from q0 on, `step` bit patterns apart.
static uint32_t wrong(uint32_t divisor, uint32_t q0, uint32_t n, uint32_t step) {
  float by = value(divisor), inverse = 1.0f / by;
  uint32_t count = 0;
  for (uint32_t i = 0; i < n; i++) {
    float q = value(q0 + i * step);
    count += bits(quotient(q, by, inverse)) != bits(q / by);
  }
  return count;
}

int main() {
  const uint32_t ONE = 0x3f800000u, ALL = 1u << 23;
  unsigned long long found = 0, tried = 0;
  for (uint32_t m = 0; m < ALL; m++) found += wrong(ONE + m, ONE, 16, ALL / 16), tried += 16;
  std::vector<uint32_t> divisors;
  for (uint32_t i = 0; i < 8; i++)
    for (uint32_t m : {i, ALL - 1 - i, 0x3504f3 + i}) divisors.push_back(m);  // near 1, 2 and their geometric mean
  for (uint32_t k = 0; k < 23; k++) divisors.push_back(1u << k), divisors.push_back((ALL - 1) ^ (1u << k));
  for (uint32_t i = 0; i < 40; i++) divisors.push_back((i * 2654435761u) >> 9);
  for (uint32_t i = 0; i < 128; i++) divisors.push_back(i << 16);  // BF16's, by which Four Over Six divides any float
  for (uint32_t m : divisors) found += wrong(ONE + m, ONE, ALL, 1), tried += ALL;
  for (uint32_t m = 0; m < 4096; m++)  // at the ends of the ranges that `divisible` admits
    for (uint32_t e : {68u, 186u})
      for (uint32_t q : {64u, 100u, 150u, 190u})
        found += wrong(e << 23 | m * 2047, q << 23, 4096, 2047), tried += 4096;
  printf("%llu of %llu", found, tried);
}
"""

COUNTERS = """
#include "random.h"
#include <cstdio>
#include <initializer_list>
using namespace fb;

int main() {
  int found = 0, tried = 0;
  for (uint64_t first : {0ull, 0xfffffff0ull, 0xfffffff1ull, 0xffffffffull, 0x100000000ull, 0xffffffffffffff8ull})
    for (uint64_t seed : {0ull, 0xffffffffull, 0x100000000ull, 0x7fffffffffffffffull})
      for (uint32_t stream : {ROUND_HIGH, ROUND_LOW, NOISE, SIGNS}) {
        for (uint64_t begin = first; begin < first + 32; begin += 2 * REGISTER) {
          U32Part all[2][4], half[1][4];
          draw_words(begin, stream, seed, all);
          draw_words(begin, stream, seed, half);
          for (uint64_t i = 0; i < 2 * REGISTER; i++, tried++) {
            Words one = philox(begin + i, stream, seed);
            for (int k = 0; k < 4; k++) {
              found += all[i / REGISTER][k][i % REGISTER] != one.w[k];
              if (i < REGISTER) found += half[0][k][i] != one.w[k];
            }
          }
        }
        constexpr int SPACE = 128;
        for (int count : {1, 128, 129, 300}) {
          uint16_t high[300 + SPACE + 1];
          high[count + SPACE] = 12345;
          fill_high(first * 8, count, seed, high);
          found += high[count + SPACE] != 12345;
          for (int i = 0; i < count; i++, tried++) found += high[i] != rounding_high(first * 8 + uint64_t(i), seed);
        }
      }
  printf("%d of %d", found, tried);
}
"""

WEIGHING = """
#include "lanes.h"
#include <cstdio>
#include <random>
using namespace fb;

static std::mt19937 generator(1);
static float uniform() { return float(generator() >> 8) * 5.9604645e-8f; }

// Compare groups whose amaxes are powers of two from 2^low to 2^high, up to rounding, in tensors with larger amaxes.
template <class D, bool STOCHASTIC> void compare(int low, int high, int *found, int *asked, int *wide, int *tried) {
  const Grid e2m1{0x3f800000u, 22, 6.0f, 6.0f, 0, 0};
  const GridWords e4m3{0x3c800000u, 20, bits(448.0f), bits(448.0f), 0, 0};
  const Scaling scaling{TWO_LEVEL, ScaleRounding::NEAREST, e4m3, 0x80, 0x7f, bits(256.0f), bits(6.0f), bits(1.5f)};
  for (int e = low; e <= high; e++)
    for (int n = 0; n < 300; n++, ++*tried) {
      typename D::Storage x[GROUP];
      float amax = 0.0f;
      for (auto &one : x) {
        const float size = uniform() < 0.1f ? 0.0f : ldexpf(uniform() * uniform(), e);
        one = D::narrow(generator() % 2 ? size : -size);
        amax = fmaxf(amax, magnitude(D::widen(one)));
      }
      const float largest = fminf(FLOAT_MAX, ldexpf(amax * (1.0f + uniform()), n % 4 ? 0 : int(generator() % 20)));
      const FourOverSix block = four_over_six(scaling, 6.0f, make_group(scaling, 6.0f, largest), amax);
      const uint64_t index = 16 * uint64_t(*tried);
      uint16_t draws[GROUP + 2 * PIECE] = {};
      if (STOCHASTIC) fill_high(index, GROUP, 7, draws);
      uint32_t ask = 0;
      const int64_t got = weigh_group<D, STOCHASTIC>(x, e2m1, block, inverse_amax<D>(amax), draws, &ask);
      const int64_t want = weigh_each<D, STOCHASTIC>(x, GROUP, e2m1, block, draws, index, 7);
      *found += !ask && got != want;
      *asked += ask != 0;
      *wide += want > INT32_MAX || want < INT32_MIN;
    }
}

int main() {
  int found = 0, asked = 0, wide = 0, tried = 0;
  compare<Bf16, false>(-130, 120, &found, &asked, &wide, &tried);
  compare<Bf16, true>(-60, 60, &found, &asked, &wide, &tried);
  compare<Fp16, false>(-24, 15, &found, &asked, &wide, &tried);
  compare<Fp16, true>(-24, 15, &found, &asked, &wide, &tried);
  compare<Fp32, false>(-140, 120, &found, &asked, &wide, &tried);
  printf("%d %d %d %d", found, asked, wide, tried);
}
"""


def output_of(program: str, folder: Path) -> str:
    source, binary = folder / "program.cpp", folder / "program"
    source.write_text(program)
    options = [*compilation.flags(compilation.requested()), "-I", str(compilation.SOURCES)]
    for step in ([*(build.compiler() or ()), *options, str(source), "-o", str(binary)], [str(binary)]):
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_quotient_without_a_division_is_the_quotient(tmp_path: Path) -> None:
    """Check every divisor with the values of a grid, and every dividend for divisors that are hard, common or random.

    Markstein's theorem requires a first guess with an error of at most one unit in the last place. A product with the
    rounded reciprocal does not guarantee this, so the test tries many quotients.
    """
    found, tried = output_of(DIVISION, tmp_path).split(" of ")
    assert int(tried) > 1 << 29
    assert int(found) == 0


def test_the_candidates_of_a_group_are_compared_as_those_of_its_elements(tmp_path: Path) -> None:
    """Check it for groups of all sizes, also with errors so large that their sums need 64 bits.

    `asked`: groups that the vectors leave to the elements, because they cannot divide by the amax or decide a draw.
    """
    found, asked, wide, tried = map(int, output_of(WEIGHING, tmp_path).split())
    assert 0 < asked < tried / 2
    assert wide > 0
    assert found == 0


def test_philox_of_counters_in_a_register_is_that_of_each_beyond_32_bits_too(tmp_path: Path) -> None:
    found, tried = output_of(COUNTERS, tmp_path).split(" of ")
    assert int(tried) == 6 * 4 * 4 * (32 + 1 + 128 + 129 + 300)
    assert int(found) == 0
