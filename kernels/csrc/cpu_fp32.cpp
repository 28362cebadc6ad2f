// `quantize` for FP32, in a separate compilation unit so that the dtypes compile in parallel.
#include "walk.h"
template void fb::quantize<fb::Fp32>(const void *, int64_t, int64_t, const fb::Request *, int, int);
