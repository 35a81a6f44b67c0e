// Advanced SIMD as every little-endian AArch64 CPU has it. Half precision is only converted, for
// which the baseline suffices.
#pragma once

#include <arm_neon.h>

#include "cpu_attn/exp2_fraction.h"
#include "cpu_attn/types.h"

namespace cpu_attn {
namespace {

struct Isa {
  static constexpr const char* kName = "neon";
  static constexpr int kWidth = 4;
  static constexpr int kAcc = 16;  // of 32 registers; the rest hold rows and queries
  using V = float32x4_t;

  static V zero() { return vdupq_n_f32(0.0f); }
  static V set1(float a) { return vdupq_n_f32(a); }
  static V load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, V a) { vst1q_f32(p, a); }
  static V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
  static V add(V a, V b) { return vaddq_f32(a, b); }
  static V sub(V a, V b) { return vsubq_f32(a, b); }
  static V mul(V a, V b) { return vmulq_f32(a, b); }
  static V max(V a, V b) { return vmaxq_f32(a, b); }
  static float reduce_max(V a) { return vmaxvq_f32(a); }
  static float reduce_add(V a) { return vaddvq_f32(a); }

  // Arguments below -126.5 give zero (no subnormals); NaN passes through max, and its exponent is
  // that of zero.
  static V exp2(V x) {
    x = vmaxq_f32(set1(-127.0f), x);
    const V n = vrndnq_f32(x);
    const V p = exp2_fraction<Isa>(vsubq_f32(x, n));
    // Unsigned: what stands beyond the last query may be huge, and its sum then wraps.
    const uint32x4_t e = vaddq_u32(vreinterpretq_u32_s32(vcvtq_s32_f32(n)), vdupq_n_u32(127));
    return vmulq_f32(p, vreinterpretq_f32_u32(vshlq_n_u32(e, 23)));
  }

  // The sums over lanes of acc[q][t] go to s[q * stride + t]. Two rounds of pairwise sums leave
  // those of four neighbours, in their order.
  template <int Q, int T>
  static void store_sums(const V (&acc)[Q][T], float* s, int stride) {
    static_assert(T % 4 == 0, "four tokens a store");
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int t = 0; t < T; t += 4) {
        const V* a = &acc[q][t];
        store(s + q * stride + t, vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])));
      }
  }

  // Rows are loaded as bytes: nothing then is assumed of their alignment.
  template <Dtype D>
  static V load_one(const char* p) {
    if constexpr (D == Dtype::kFloat32) {
      return vreinterpretq_f32_u8(bytes(p));
    } else {
      const uint8x8_t h = vld1_u8(reinterpret_cast<const uint8_t*>(p));
      if constexpr (D == Dtype::kFloat16) return vcvt_f32_f16(vreinterpret_f16_u8(h));
      return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(h), 16));
    }
  }
  static constexpr bool kInterleavesBf16 = true;
  template <Dtype D>
  static void load_pair(const char* p, V& a, V& b) {
    if constexpr (D == Dtype::kBFloat16) {
      const uint32x4_t x = vreinterpretq_u32_u8(bytes(p));
      a = vreinterpretq_f32_u32(vshlq_n_u32(x, 16));
      b = vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000u)));
    } else if constexpr (D == Dtype::kFloat16) {
      const float16x8_t h = vreinterpretq_f16_u8(bytes(p));
      a = vcvt_f32_f16(vget_low_f16(h));
      b = vcvt_high_f32_f16(h);
    } else {
      a = load_one<D>(p);
      b = load_one<D>(p + kWidth * dtype_bytes(D));
    }
  }

  // No instruction here takes its operand from memory, so this only hides constants from the probe.
  static void hold(V& a) { asm("" : "+w"(a)); }

  // Into the second level, as elsewhere.
  static void prefetch(const char* p) { __builtin_prefetch(p, 0, 2); }

  static uint64_t read(const char* data, size_t size) {
    uint8x16_t sum[4] = {};
    size_t i = 0;
    for (; i + 64 <= size; i += 64)
      for (int j = 0; j < 4; ++j) sum[j] = veorq_u8(sum[j], bytes(data + i + 16 * j));
    uint64_t rest = 0;
    for (; i < size; ++i) rest ^= static_cast<unsigned char>(data[i]);
    const uint64x2_t x =
        vreinterpretq_u64_u8(veorq_u8(veorq_u8(sum[0], sum[1]), veorq_u8(sum[2], sum[3])));
    return rest ^ vgetq_lane_u64(x, 0) ^ vgetq_lane_u64(x, 1);
  }

 private:
  static uint8x16_t bytes(const char* p) { return vld1q_u8(reinterpret_cast<const uint8_t*>(p)); }
};

}  // namespace
}  // namespace cpu_attn
