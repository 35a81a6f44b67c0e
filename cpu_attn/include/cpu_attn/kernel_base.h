// What every kernel needs: short names, the merge of partial states. Include after exactly one
// isa_*.h; everything here has internal linkage.
#pragma once

#include <limits>

#include "cpu_attn/types.h"

extern "C" float log2f(float);

namespace cpu_attn {
namespace {

using V = Isa::V;
constexpr int W = Isa::kWidth;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

float exp2_one(float x) {
  float lanes[W];
  Isa::store(lanes, Isa::exp2(Isa::set1(x)));
  return lanes[0];
}

// Merges the sums and maxima of a head, and add(acc, factor) of each state that holds tokens.
// Returns what normalises the merged accumulator.
template <class Add>
float merge_states(const State* states, int count, int h, float* lse, const Add& add) {
  float top = kNegInf, sum = 0.0f;
  for (int i = 0; i < count; ++i) top = states[i].max[h] > top ? states[i].max[h] : top;
  for (int i = 0; i < count; ++i) {
    if (states[i].max[h] == kNegInf && states[i].sum[h] == 0.0f) continue;
    const float factor = exp2_one(states[i].max[h] - top);
    sum += factor * states[i].sum[h];
    add(states[i].acc, factor);
  }
  *lse = sum == 0.0f ? kNegInf : top + log2f(sum);
  return sum == 0.0f ? 0.0f : 1.0f / sum;
}

}  // namespace
}  // namespace cpu_attn
