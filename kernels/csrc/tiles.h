// The instructions of AMX: products of BF16 tiles. A tile of A has 16 rows of 32 values, a tile of B has 16 pairs of
// rows of 16 columns, and a tile of sums has 16 x 16 floats. Tiles 0 to 3 are a block of 32 x 32 sums.
//
// Tests replace this file by an emulation in C++ (tests/kernels/emulated_tiles.h), to check the layout of
// operands on any processor.
#pragma once
#if defined(FB_EMULATED_TILES)
#include FB_EMULATED_TILES
#define FB_TILES
#elif defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>
#define FB_TILES

namespace fb {
namespace tiles {

// Ask Linux, once, for the permission to use tiles. If Linux refuses it, the callers use the vector units.
inline bool permitted() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return granted;
}

// GCC does not know which memory its intrinsics load tiles from, so without this barrier it may drop or delay stores to
// this memory.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// While this object exists, all tiles have 16 rows of 64 bytes. (Releasing them at the end does not disturb oneDNN,
// which configures tiles before each of its products.)
struct Session {
  Session() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; i++) shape.row_bytes[i] = 64, shape.rows[i] = 16;
    finish_stores();
    _tile_loadconfig(&shape);
    finish_stores();  // so that the compiler keeps `shape` in memory until the configuration is loaded
  }
  ~Session() { _tile_release(); }
};

// Begin a product: its operands have to be in memory, since add_product only loads tiles.
inline void zero_sums() {
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
inline void load_sums(const float *c, int64_t stride) {
  finish_stores();
  _tile_loadd(0, c, stride * 4);
  _tile_loadd(1, c + 16, stride * 4);
  _tile_loadd(2, c + 16 * stride, stride * 4);
  _tile_loadd(3, c + 16 * stride + 16, stride * 4);
}
inline void store_sums(float *c, int64_t stride) {
  _tile_stored(0, c, stride * 4);
  _tile_stored(1, c + 16, stride * 4);
  _tile_stored(2, c + 16 * stride, stride * 4);
  _tile_stored(3, c + 16 * stride + 16, stride * 4);
}
// Add the product of 32 rows of A (stride in bytes) and two adjacent tiles of B to the 32 x 32 sums.
inline void add_product(const void *a, int64_t stride, const void *b) {
  _tile_loadd(4, a, stride);
  _tile_loadd(6, b, 64);
  _tile_loadd(7, (const char *)b + 1024, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, (const char *)a + 16 * stride, stride);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Like zero_sums, add_product and store_sums, for only the upper (HALF = 0) or lower (HALF = 1) 16 rows of the sums;
// `a` are 16 rows of A.
template <int HALF> inline void zero_half() {
  finish_stores();
  if (HALF) {
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
}
template <int HALF> inline void add_half(const void *a, int64_t stride, const void *b) {
  if (HALF) {
    _tile_loadd(5, a, stride);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, (const char *)b + 1024, 64);
    _tile_dpbf16ps(3, 5, 7);
  } else {
    _tile_loadd(4, a, stride);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, (const char *)b + 1024, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
}
template <int HALF> inline void store_half(float *c, int64_t stride) {
  if (HALF) {
    _tile_stored(2, c, stride * 4);
    _tile_stored(3, c + 16, stride * 4);
  } else {
    _tile_stored(0, c, stride * 4);
    _tile_stored(1, c + 16, stride * 4);
  }
  finish_stores();
}

}  // namespace tiles
}  // namespace fb
#endif
