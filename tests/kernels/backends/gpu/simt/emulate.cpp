// Functions that run the CUDA kernels on the CPU. tests/kernels/backends/gpu/emulated.py calls them through ctypes.
#include "simt.h"

#include "decide.cu"
#include "decode.cu"
#include "layers.cu"
#include "observe.cu"
#include "quantize.cu"
#include "weights.cu"

namespace {

template <class F> void with_dtype(int dtype, F f) {
  switch (dtype) {
    case 0:
      return f(fb::Bf16{});
    case 1:
      return f(fb::Fp16{});
    default:
      return f(fb::Fp32{});
  }
}

}  // namespace

// Set the seed of the order in which later launches run threads and CTAs; 0: numeric order.
extern "C" void simt_shuffle(uint64_t seed) { simt::shuffle = seed; }
extern "C" uint64_t simt_atomics() { return simt::atomics; }
// Remove the barrier FILE:LINE from all later launches. It is called before the first launch.
extern "C" void simt_remove(const char *barrier) { simt::removed = barrier; }
// Return the names of the barriers that threads have reached since the last call, each with a space behind it.
extern "C" const char *simt_reached() {
  static std::string names;
  names.clear();
  for (simt::Barrier *barrier : simt::barriers)
    if (barrier->reached) names += barrier->name + " ", barrier->reached = false;
  return names.c_str();
}

extern "C" void simt_quantize(int kernel, int dtype, const fb::Variant *variant, unsigned blocks, unsigned shared,
                              const fb::Call *call) {
  fb::variant = *variant;
  with_dtype(dtype, [&](auto d) {
    typedef decltype(d) D;
    void (*const kernels[])(const fb::Call &) = {fb::quantize<D>, fb::measure<D>, fb::extent<D>, fb::weigh<D>,
                                                 fb::quantize_strip<D>};
    simt::run(blocks, variant->shape.threads, shared, [&] { kernels[kernel](*call); });
  });
}

extern "C" void simt_decide(int, int, const fb::Variant *variant, unsigned blocks, unsigned shared,
                            const fb::DecideCall *call) {
  fb::variant = *variant;
  simt::run(blocks, variant->shape.threads, shared, [&] { fb::decide<fb::Fp32>(*call); });
}

extern "C" void simt_observe(int, int, const fb::Variant *variant, unsigned blocks, unsigned shared,
                             const fb::ObserveCall *call) {
  fb::variant = *variant;
  simt::run(blocks, variant->shape.threads, shared, [&] { fb::observe<fb::Fp32>(*call); });
}

extern "C" void simt_decode(int, int dtype, const fb::Variant *variant, unsigned blocks, unsigned shared,
                            const fb::DecodeCall *call) {
  fb::variant = *variant;
  with_dtype(dtype, [&](auto d) {
    simt::run(blocks, variant->shape.threads, shared, [&] { fb::decode<decltype(d)>(*call); });
  });
}

extern "C" void simt_layers(int kernel, int dtype, int other, const fb::Variant *variant, unsigned blocks,
                            unsigned shared, const fb::LayerCall *call) {
  fb::variant = *variant;
  with_dtype(dtype, [&](auto d) {
    with_dtype(other, [&](auto o) {
      typedef decltype(d) D;
      typedef decltype(o) O;
      void (*const kernels[])(const fb::LayerCall &) = {fb::norm<D, O>,
                                                        fb::norm_backward<D, O>,
                                                        fb::norm_weights<D, O>,
                                                        fb::entropy<D, O>,
                                                        fb::entropy_backward<D, O>,
                                                        fb::rotate<D, O>,
                                                        fb::squared_relu<D, O>,
                                                        fb::squared_relu_backward<D, O>,
                                                        fb::gelu<D, O>,
                                                        fb::gelu_backward<D, O>,
                                                        fb::swiglu<D, O>,
                                                        fb::swiglu_backward<D, O>};
      simt::run(blocks, variant->shape.threads, shared, [&] { kernels[kernel](*call); });
    });
  });
}

extern "C" void simt_weights(int kernel, int dtype, int other, const fb::Variant *variant, unsigned blocks,
                             unsigned shared, const fb::WeightCall *call) {
  fb::variant = *variant;
  with_dtype(dtype, [&](auto d) {
    with_dtype(other, [&](auto o) {
      typedef decltype(d) D;
      typedef decltype(o) O;
      void (*const kernels[])(const fb::WeightCall &) = {fb::gaussian_noise<D, O>, fb::uniform_noise<D, O>,
                                                         fb::sample_weight<D, O>, fb::sample_weight_backward<D, O>};
      simt::run(blocks, variant->shape.threads, shared, [&] { kernels[kernel](*call); });
    });
  });
}
