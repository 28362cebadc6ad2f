// The pass for FP32, in a unit of its own so that dtypes compile in parallel.
#include "walk.h"
template void fb::quantize<fb::Fp32>(const void *, int64_t, int64_t, const fb::Request *, int, int);
