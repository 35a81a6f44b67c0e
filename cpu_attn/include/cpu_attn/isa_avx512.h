// AVX-512 F + BW + VL. Only the translation unit compiled with those flags may include this.
#pragma once

#include <immintrin.h>

#include "cpu_attn/exp2_fraction.h"
#include "cpu_attn/types.h"

namespace cpu_attn {
namespace {

struct Isa {
  static constexpr const char* kName = "avx512";
  static constexpr int kWidth = 16;
  static constexpr int kAcc = 16;  // of 32 registers; the rest hold rows and queries
  using V = __m512;

  static V zero() { return _mm512_setzero_ps(); }
  static V set1(float a) { return _mm512_set1_ps(a); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V a) { _mm512_storeu_ps(p, a); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static float reduce_max(V a) { return _mm512_reduce_max_ps(a); }
  static float reduce_add(V a) { return _mm512_reduce_add_ps(a); }

  // The clamp keeps -inf from becoming inf - inf; NaN passes through (operand order of max).
  static V exp2(V x) {
    x = _mm512_max_ps(set1(-160.0f), x);
    const V n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const V p = exp2_fraction<Isa>(_mm512_sub_ps(x, n));
    return _mm512_scalef_ps(p, n);
  }

  // The sums over lanes of acc[q][t] go to s[q * stride + t]; Q * T == 16.
  template <int Q, int T>
  static void store_sums(const V (&acc)[Q][T], float* s, int stride) {
    static_assert(Q * T == kAcc, "one full tile");
    const V* a = &acc[0][0];
    V quad[4];  // quad[i]: four partial sums each of a[4i..4i+3], one per 128-bit lane
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const V x = fold(a[4 * i], a[4 * i + 1]), y = fold(a[4 * i + 2], a[4 * i + 3]);
      quad[i] = _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
    }
    const V half0 = fold_lanes(quad[0], quad[1]), half1 = fold_lanes(quad[2], quad[3]);
    const V r = _mm512_add_ps(_mm512_shuffle_f32x4(half0, half1, 0x88),
                              _mm512_shuffle_f32x4(half0, half1, 0xdd));
    if constexpr (T == 16) {
      store(s, r);
    } else if constexpr (T == 8) {
      const __m512d d = _mm512_castps_pd(r);
      _mm256_storeu_pd(reinterpret_cast<double*>(s), _mm512_castpd512_pd256(d));
      _mm256_storeu_pd(reinterpret_cast<double*>(s + stride), _mm512_extractf64x4_pd(d, 1));
    } else {
      static_assert(T == 4, "four tokens a tile");
      _mm_storeu_ps(s, _mm512_extractf32x4_ps(r, 0));
      _mm_storeu_ps(s + stride, _mm512_extractf32x4_ps(r, 1));
      _mm_storeu_ps(s + 2 * stride, _mm512_extractf32x4_ps(r, 2));
      _mm_storeu_ps(s + 3 * stride, _mm512_extractf32x4_ps(r, 3));
    }
  }

  template <Dtype D>
  static V load_one(const char* p) {
    if constexpr (D == Dtype::kFloat32) {
      return load(reinterpret_cast<const float*>(p));
    } else {
      const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      if constexpr (D == Dtype::kFloat16) return _mm512_cvtph_ps(h);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    }
  }
  static constexpr bool kInterleavesBf16 = true;
  template <Dtype D>
  static void load_pair(const char* p, V& a, V& b) {
    if constexpr (D == Dtype::kBFloat16) {
      const __m512i x = _mm512_loadu_si512(p);
      const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
      a = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
      b = _mm512_castsi512_ps(_mm512_and_si512(x, high));
    } else {
      a = load_one<D>(p);
      b = load_one<D>(p + kWidth * dtype_bytes(D));
    }
  }

  // Keeps the compiler from folding one load into each of its uses: loads are what runs out.
  static void hold(V& a) { asm("" : "+v"(a)); }

  // Into the second level: a burst of prefetches into the first one stalls on its few fill buffers.
  static void prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

  static uint64_t read(const char* data, size_t bytes) {
    __m512i sum[4] = {};
    size_t i = 0;
    for (; i + 256 <= bytes; i += 256)
      for (int j = 0; j < 4; ++j)
        sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(data + i + 64 * j));
    uint64_t rest = 0;
    for (; i < bytes; ++i) rest ^= static_cast<unsigned char>(data[i]);
    const __m512i x =
        _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3]));
    return rest ^ static_cast<uint64_t>(_mm512_reduce_or_epi64(x));
  }

 private:
  // The blends spare a second shuffle each. Per 128-bit lane: two partial sums of a, two of b.
  static V fold(V a, V b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_mask_blend_pd(0xaa, x, y)),
                         _mm512_castpd_ps(_mm512_shuffle_pd(x, y, 0x55)));
  }
  // Lanes (a0 + a2, a1 + a3, b2 + b0, b3 + b1).
  static V fold_lanes(V a, V b) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
  }
};

}  // namespace
}  // namespace cpu_attn
