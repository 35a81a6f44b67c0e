// Portable vector: eight floats the compiler may map to whatever the baseline offers.
#pragma once

#include <cmath>
#include <cstring>

#include "cpu_attn/types.h"

namespace cpu_attn {
namespace {

struct Isa {
  static constexpr const char* kName = "scalar";
  static constexpr int kWidth = 8;
  static constexpr int kAcc = 8;  // accumulators of one register tile
  struct V {
    float x[kWidth];
  };

  static V zero() { return set1(0.0f); }
  static V set1(float a) {
    V r;
    for (int i = 0; i < kWidth; ++i) r.x[i] = a;
    return r;
  }
  static V load(const float* p) {
    V r;
    std::memcpy(r.x, p, sizeof(r.x));
    return r;
  }
  static void store(float* p, V a) { std::memcpy(p, a.x, sizeof(a.x)); }
  static V fma(V a, V b, V c) {
    for (int i = 0; i < kWidth; ++i) c.x[i] += a.x[i] * b.x[i];
    return c;
  }
  static V add(V a, V b) {
    for (int i = 0; i < kWidth; ++i) a.x[i] += b.x[i];
    return a;
  }
  static V sub(V a, V b) {
    for (int i = 0; i < kWidth; ++i) a.x[i] -= b.x[i];
    return a;
  }
  static V mul(V a, V b) {
    for (int i = 0; i < kWidth; ++i) a.x[i] *= b.x[i];
    return a;
  }
  static V max(V a, V b) {
    for (int i = 0; i < kWidth; ++i) a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i];
    return a;
  }
  static float reduce_max(V a) {
    float r = a.x[0];
    for (int i = 1; i < kWidth; ++i) r = a.x[i] > r ? a.x[i] : r;
    return r;
  }
  static float reduce_add(V a) {
    return ((a.x[0] + a.x[4]) + (a.x[2] + a.x[6])) + ((a.x[1] + a.x[5]) + (a.x[3] + a.x[7]));
  }
  static V exp2(V a) {
    for (int i = 0; i < kWidth; ++i) a.x[i] = ::exp2f(a.x[i]);
    return a;
  }

  // The sums over lanes of acc[q][t] go to s[q * stride + t].
  template <int Q, int T>
  static void store_sums(const V (&acc)[Q][T], float* s, int stride) {
    for (int q = 0; q < Q; ++q)
      for (int t = 0; t < T; ++t) s[q * stride + t] = reduce_add(acc[q][t]);
  }

  static float widen(uint16_t h, Dtype dtype) {
    uint32_t bits;
    if (dtype == Dtype::kBFloat16) {
      bits = static_cast<uint32_t>(h) << 16;
    } else {
      const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
      const uint32_t magnitude = h & 0x7fffu;
      if (magnitude >= 0x7c00u) {
        bits = 0x7f800000u | (magnitude & 0x3ffu) << 13;
      } else {
        // 2^112 moves the exponent bias from 15 to 127 and normalises subnormals on the way.
        const uint32_t shifted = magnitude << 13;
        float value;
        std::memcpy(&value, &shifted, 4);
        value *= 5.192296858534828e33f;
        std::memcpy(&bits, &value, 4);
      }
      bits |= sign;
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
  }

  template <Dtype D>
  static V load_one(const char* p) {
    if constexpr (D == Dtype::kFloat32) {
      return load(reinterpret_cast<const float*>(p));
    } else {
      uint16_t h[kWidth];
      std::memcpy(h, p, sizeof(h));
      V r;
      for (int i = 0; i < kWidth; ++i) r.x[i] = widen(h[i], D);
      return r;
    }
  }
  // Two vectors of natural order, except bfloat16 of other sets: see kernel_tiles.h, lane order.
  static constexpr bool kInterleavesBf16 = false;
  template <Dtype D>
  static void load_pair(const char* p, V& a, V& b) {
    a = load_one<D>(p);
    b = load_one<D>(p + kWidth * dtype_bytes(D));
  }

  static void hold(V&) {}

  static void prefetch(const char* p) { __builtin_prefetch(p, 0, 2); }

  static uint64_t read(const char* data, size_t bytes) {
    uint64_t sum[4] = {};
    size_t i = 0;
    for (; i + 32 <= bytes; i += 32) {
      uint64_t x[4];
      std::memcpy(x, data + i, 32);
      for (int j = 0; j < 4; ++j) sum[j] += x[j];
    }
    for (; i < bytes; ++i) sum[0] += static_cast<unsigned char>(data[i]);
    return sum[0] + sum[1] + sum[2] + sum[3];
  }
};

}  // namespace
}  // namespace cpu_attn
