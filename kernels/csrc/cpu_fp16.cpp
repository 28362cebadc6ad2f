// The walk for FP16, a unit by itself so that compilers take the dtypes side by side.
#include "walk.h"
template void fb::quantize<fb::Fp16>(const void *, int64_t, int64_t, const fb::Request *, int, int);
