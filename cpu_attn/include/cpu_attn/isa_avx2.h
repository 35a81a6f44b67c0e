// AVX2 + FMA + F16C. Only the translation unit compiled with those flags may include this.
#pragma once

#include <immintrin.h>

#include "cpu_attn/exp2_fraction.h"
#include "cpu_attn/types.h"

namespace cpu_attn {
namespace {

struct Isa {
  static constexpr const char* kName = "avx2";
  static constexpr int kWidth = 8;
  static constexpr int kAcc = 8;  // of 16 registers; the rest hold rows and queries
  using V = __m256;

  static V zero() { return _mm256_setzero_ps(); }
  static V set1(float a) { return _mm256_set1_ps(a); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, V a) { _mm256_storeu_ps(p, a); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static float reduce_max(V a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static float reduce_add(V a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }

  // Arguments below -126.5 give zero (no subnormals); NaN passes through (operand order of max).
  static V exp2(V x) {
    x = _mm256_max_ps(set1(-127.0f), x);
    const V n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const V p = exp2_fraction<Isa>(_mm256_sub_ps(x, n));
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), bias), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(e));
  }

  // The sums over lanes of acc[q][t] go to s[q * stride + t]; Q * T == 8.
  template <int Q, int T>
  static void store_sums(const V (&acc)[Q][T], float* s, int stride) {
    static_assert(Q * T == kAcc, "one full tile");
    const V* a = &acc[0][0];
    const V u0 = _mm256_hadd_ps(fold(a[0], a[1]), fold(a[2], a[3]));
    const V u1 = _mm256_hadd_ps(fold(a[4], a[5]), fold(a[6], a[7]));
    const V r = _mm256_add_ps(_mm256_blend_ps(u0, u1, 0xf0), _mm256_permute2f128_ps(u0, u1, 0x21));
    if constexpr (T == 8) {
      store(s, r);
    } else {
      const __m128 lo = _mm256_castps256_ps128(r);
      const __m128 hi = _mm256_extractf128_ps(r, 1);
      if constexpr (T == 4) {
        _mm_storeu_ps(s, lo);
        _mm_storeu_ps(s + stride, hi);
      } else {
        static_assert(T == 2, "two tokens a tile");
        _mm_storel_pi(reinterpret_cast<__m64*>(s), lo);
        _mm_storeh_pi(reinterpret_cast<__m64*>(s + stride), lo);
        _mm_storel_pi(reinterpret_cast<__m64*>(s + 2 * stride), hi);
        _mm_storeh_pi(reinterpret_cast<__m64*>(s + 3 * stride), hi);
      }
    }
  }

  template <Dtype D>
  static V load_one(const char* p) {
    if constexpr (D == Dtype::kFloat32) {
      return load(reinterpret_cast<const float*>(p));
    } else {
      const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      if constexpr (D == Dtype::kFloat16) return _mm256_cvtph_ps(h);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    }
  }
  static constexpr bool kInterleavesBf16 = true;
  template <Dtype D>
  static void load_pair(const char* p, V& a, V& b) {
    if constexpr (D == Dtype::kBFloat16) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      a = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
      const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
      b = _mm256_castsi256_ps(_mm256_and_si256(x, high));
    } else {
      a = load_one<D>(p);
      b = load_one<D>(p + kWidth * dtype_bytes(D));
    }
  }

  // Keeps the compiler from folding one load into each of its uses: loads are what runs out.
  static void hold(V& a) { asm("" : "+x"(a)); }

  // Into the second level: a burst of prefetches into the first one stalls on its few fill buffers.
  static void prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

  static uint64_t read(const char* data, size_t bytes) {
    __m256i sum[4] = {};
    size_t i = 0;
    for (; i + 128 <= bytes; i += 128)
      for (int j = 0; j < 4; ++j)
        sum[j] = _mm256_xor_si256(
            sum[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i + 32 * j)));
    uint64_t rest = 0;
    for (; i < bytes; ++i) rest ^= static_cast<unsigned char>(data[i]);
    const __m256i x =
        _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
    return rest ^ static_cast<uint64_t>(_mm256_extract_epi64(x, 0) ^ _mm256_extract_epi64(x, 1) ^
                                        _mm256_extract_epi64(x, 2) ^ _mm256_extract_epi64(x, 3));
  }

 private:
  // Per 128-bit lane: two partial sums of a, then two of b. The blend spares a second shuffle.
  static V fold(V a, V b) {
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_blend_pd(x, y, 0b1010)),
                         _mm256_castpd_ps(_mm256_shuffle_pd(x, y, 0b0101)));
  }
};

}  // namespace
}  // namespace cpu_attn
