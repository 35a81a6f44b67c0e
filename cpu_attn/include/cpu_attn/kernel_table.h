// Collects what one translation unit compiled. Include after exactly one isa_*.h; defines kernel()
// with internal linkage.
#pragma once

#include "cpu_attn/kernel_body.h"
#include "cpu_attn/latent_body.h"

namespace cpu_attn {
namespace {

void accumulate_latent(const Shape& shape, const Region* regions, const Segment& segment,
                       float* scratch, State state) {
  constexpr Dtype kF32 = Dtype::kFloat32, kF16 = Dtype::kFloat16, kBf16 = Dtype::kBFloat16;
  switch (shape.kv_dtype) {
    case kF32:
      return accumulate_latent_as<kF32, WideScores<kF32>>(shape, regions, segment, scratch, state);
    case kF16:
      return accumulate_latent_as<kF16, WideScores<kF16>>(shape, regions, segment, scratch, state);
    case kBf16:
      return accumulate_latent_as<kBf16, WideScores<kBf16>>(shape, regions, segment, scratch,
                                                            state);
  }
}

uint64_t read_bytes(const char* data, size_t bytes) { return Isa::read(data, bytes); }

double multiply_wide(int64_t rounds) {
  V acc[Isa::kAcc], a = Isa::set1(1.0f), b = Isa::set1(1e-9f);
  for (V& x : acc) x = Isa::zero();
  Isa::hold(a);
  Isa::hold(b);
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < Isa::kAcc; ++j) acc[j] = Isa::fma(a, b, acc[j]);
  float total = 0.0f;
  // Unrolled, else GCC stores the accumulators in every round for this loop to index.
#pragma GCC unroll 16
  for (const V& x : acc) total += Isa::reduce_add(x);
  [[maybe_unused]] volatile float kept = total;
  return 2.0 * Isa::kAcc * W * rounds;
}

const Kernel* kernel() {
  static const Kernel kernel{
      Isa::kName,
      {scratch_floats, accumulate, finish},
      {latent_scratch_floats, accumulate_latent, finish},
      read_bytes,
      multiply_wide,
  };
  return &kernel;
}

}  // namespace
}  // namespace cpu_attn
