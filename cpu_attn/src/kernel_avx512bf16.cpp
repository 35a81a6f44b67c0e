// AVX-512 with products of bf16 pairs: twice the scores of fp32 lanes, exact products, fp32 sums.
// Weighted sums stay fp32, because a weight has no exact bf16 form.
#include "cpu_attn/isa_avx512.h"
// The instruction set comes first.
#include "cpu_attn/dispatch.h"
#include "cpu_attn/latent_body.h"

#include <cstring>

namespace cpu_attn {
namespace {

constexpr int kStepBytes = 64;

__m512 multiply_pairs(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Scores from bf16 rows and queries as they are. Queries are packed to whole vectors, zeros last.
struct PairScores {
  static int64_t packed_bytes(const Shape& shape) {
    return (shape.head_dim * 2 + kStepBytes - 1) / kStepBytes * kStepBytes;
  }
  static void pack(const Shape& shape, const Segment& segment, float* q) {
    const int64_t packed = packed_bytes(shape);
    char* to = reinterpret_cast<char*>(q);
    for (int h = 0; h < shape.q_heads; ++h, to += packed) {
      std::memset(to + packed - kStepBytes, 0, kStepBytes);
      std::memcpy(to, segment.q + h * segment.q_head_stride, shape.head_dim * 2);
    }
  }

  template <int Q>
  static void tile(const LatentWork& work, int head, const Rows& rows, float* scores) {
    constexpr int T = Isa::kAcc / Q;
    const int row_bytes = work.shape.head_dim * 2;
    const int64_t packed = packed_bytes(work.shape);
    const char* q = reinterpret_cast<const char*>(work.q) + head * packed;
    for (int t = 0; t < rows.count; t += T) {
      const char* const* k = rows.k + t;
      V acc[Q][T];
#pragma GCC unroll 16
      for (int j = 0; j < Q; ++j)
#pragma GCC unroll 16
        for (int i = 0; i < T; ++i) acc[j][i] = Isa::zero();
      int c = 0;
      for (; c + kStepBytes <= row_bytes; c += kStepBytes)
        step<Q, T>(acc, k, q, packed, c, [](const char* p) { return _mm512_loadu_si512(p); });
      if (c < row_bytes)
        step<Q, T>(acc, k, q, packed, c, [](const char* p) {
          return _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        });
      Isa::store_sums<Q, T>(acc, scores + t, kBlockTokens);
    }
  }

  static void scale(const LatentWork& work, int tokens) {
    const V factor = Isa::set1(work.shape.scale_log2);
    for (int j = 0; j < work.shape.q_heads; ++j) {
      float* s = work.scores + j * kBlockTokens;
      for (int t = 0; t < tokens; t += W) Isa::store(s + t, Isa::mul(Isa::load(s + t), factor));
    }
  }

 private:
  template <int Q, int T, class Load>
  static void step(V (&acc)[Q][T], const char* const* k, const char* q, int64_t packed, int c,
                   const Load& load) {
    __m512i row[T];
#pragma GCC unroll 16
    for (int i = 0; i < T; ++i) row[i] = load(k[i] + c);
#pragma GCC unroll 16
    for (int j = 0; j < Q; ++j) {
      const __m512i query = _mm512_load_si512(q + j * packed + c);
#pragma GCC unroll 16
      for (int i = 0; i < T; ++i) acc[j][i] = multiply_pairs(acc[j][i], row[i], query);
    }
  }
};

void accumulate_pairs(const Shape& shape, const Region* regions, const Segment& segment,
                      float* scratch, State state) {
  if (shape.kv_dtype == Dtype::kBFloat16 && shape.q_dtype == Dtype::kBFloat16)
    return accumulate_latent_as<Dtype::kBFloat16, PairScores>(shape, regions, segment, scratch,
                                                              state);
  kernel_avx512()->latent.accumulate(shape, regions, segment, scratch, state);
}

double multiply_registers(int64_t rounds) {
  V acc[Isa::kAcc];
  for (V& x : acc) x = Isa::zero();
  const __m512i one = _mm512_set1_epi32(0x3f803f80);
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < Isa::kAcc; ++j) acc[j] = multiply_pairs(acc[j], one, one);
  float total = 0.0f;
  for (const V& x : acc) total += Isa::reduce_add(x);
  [[maybe_unused]] volatile float kept = total;
  return 2.0 * Isa::kAcc * 2 * W * rounds;
}

}  // namespace

const Kernel* kernel_avx512bf16() {
  static const Kernel kernel{
      "avx512bf16",
      kernel_avx512()->heads,
      {latent_scratch_floats, accumulate_pairs, finish},
      kernel_avx512()->read,
      multiply_registers,
  };
  return &kernel;
}

}  // namespace cpu_attn
