// What a walk starts and ends with: packed queries, an empty state, the output.
// Include after exactly one isa_*.h; everything here has internal linkage.
#pragma once

#include "cpu_attn/kernel_base.h"
#include "cpu_attn/kernel_tiles.h"
#include "cpu_attn/types.h"

namespace cpu_attn {
namespace {

void pack_queries(const Shape& shape, const Segment& segment, float* packed) {
  const int d = shape.head_dim;
  float natural[kMaxHeadDim];
  for (int h = 0; h < shape.q_heads; ++h) {
    const char* q = segment.q + h * segment.q_head_stride;
    if (shape.q_dtype == Dtype::kFloat32)
      widen_row<Dtype::kFloat32>(q, d, shape.scale_log2, natural);
    else if (shape.q_dtype == Dtype::kFloat16)
      widen_row<Dtype::kFloat16>(q, d, shape.scale_log2, natural);
    else
      widen_row<Dtype::kBFloat16>(q, d, shape.scale_log2, natural);
    to_lane_order(shape.kv_dtype, natural, d, packed + h * d);
  }
}

void clear_state(const Shape& shape, State state) {
  for (int h = 0; h < shape.q_heads; ++h) {
    state.max[h] = kNegInf;
    state.sum[h] = 0.0f;
    for (int i = 0; i < shape.value_dim; i += W)
      Isa::store(state.acc + h * shape.value_dim + i, Isa::zero());
  }
}

void finish(const Shape& shape, const State* states, int count, int h, float* out, float* lse) {
  const int d = shape.value_dim;
  float packed[kMaxHeadDim];
  for (int c = 0; c < d; c += W) Isa::store(packed + c, Isa::zero());
  const auto add = [&](const float* acc, float factor) {
    const float* head = acc + static_cast<size_t>(h) * d;
    for (int c = 0; c < d; c += W)
      Isa::store(packed + c,
                 Isa::fma(Isa::load(head + c), Isa::set1(factor), Isa::load(packed + c)));
  };
  const float inverse = merge_states(states, count, h, lse, add);
  from_lane_order(shape.kv_dtype, packed, d, inverse, out);
}

}  // namespace
}  // namespace cpu_attn
