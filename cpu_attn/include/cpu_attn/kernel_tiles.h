// Register tiles of decode attention, written once for every instruction set. Include after exactly
// one isa_*.h; everything here has internal linkage so that no function compiled with wider
// instructions can be linked into another path.
//
// Lane order: a pair load of bfloat16 yields the even elements in its first vector and the odd
// ones in its second (a shift and a mask, no shuffle). Packed queries and State::acc use the same
// order within each 2 * kWidth chunk, so dot products need no fix-up; finish() restores it.
#pragma once

#include "cpu_attn/kernel_base.h"
#include "cpu_attn/types.h"

namespace cpu_attn {
namespace {

// Rows of one KV head, in token order.
struct Rows {
  const char* k[kBlockTokens];
  const char* v[kBlockTokens];
  int count;
};

constexpr bool interleaved(Dtype dtype) {
  return Isa::kInterleavesBf16 && dtype == Dtype::kBFloat16;
}

// Between natural and lane order, [head_dim] each; the copy back also multiplies.
void to_lane_order(Dtype dtype, const float* natural, int d, float* packed) {
  int c = 0;
  if (interleaved(dtype)) {
    for (; c + 2 * W <= d; c += 2 * W)
      for (int i = 0; i < W; ++i) {
        packed[c + i] = natural[c + 2 * i];
        packed[c + W + i] = natural[c + 2 * i + 1];
      }
  }
  for (; c < d; ++c) packed[c] = natural[c];
}

void from_lane_order(Dtype dtype, const float* packed, int d, float factor, float* natural) {
  int c = 0;
  if (interleaved(dtype)) {
    for (; c + 2 * W <= d; c += 2 * W)
      for (int i = 0; i < W; ++i) {
        natural[c + 2 * i] = packed[c + i] * factor;
        natural[c + 2 * i + 1] = packed[c + W + i] * factor;
      }
  }
  for (; c < d; ++c) natural[c] = packed[c] * factor;
}

template <Dtype QD>
void widen_row(const char* q, int d, float factor, float* out) {
  for (int i = 0; i < d; i += W)
    Isa::store(out + i, Isa::mul(Isa::load_one<QD>(q + i * dtype_bytes(QD)), Isa::set1(factor)));
}

// Scores of Q queries against every row: s[q][t] = q . k[t].
template <Dtype D, int Q>
void score_tile(const float* q, int d, const Rows& rows, const Rows* ahead, float* s) {
  constexpr int T = Isa::kAcc / Q;
  const int row_bytes = d * dtype_bytes(D);
  for (int t = 0; t < rows.count; t += T) {
    const char* const* k = rows.k + t;
    if (ahead != nullptr) {
      for (int i = t; i < t + T && i < ahead->count; ++i)
        for (int b = 0; b < row_bytes; b += 64) Isa::prefetch(ahead->k[i] + b);
    }
    V acc[Q][T];
#pragma GCC unroll 16
    for (int j = 0; j < Q; ++j)
#pragma GCC unroll 16
      for (int i = 0; i < T; ++i) acc[j][i] = Isa::zero();
    int c = 0;
    for (; c + 2 * W <= d; c += 2 * W) {
      if constexpr (T <= Q) {  // hold the rows in registers, stream the queries
        V lo[T], hi[T];
#pragma GCC unroll 16
        for (int i = 0; i < T; ++i) Isa::load_pair<D>(k[i] + c * dtype_bytes(D), lo[i], hi[i]);
#pragma GCC unroll 16
        for (int j = 0; j < Q; ++j) {
          V a = Isa::load(q + j * d + c);
          Isa::hold(a);
#pragma GCC unroll 16
          for (int i = 0; i < T; ++i) acc[j][i] = Isa::fma(lo[i], a, acc[j][i]);
          V b = Isa::load(q + j * d + c + W);
          Isa::hold(b);
#pragma GCC unroll 16
          for (int i = 0; i < T; ++i) acc[j][i] = Isa::fma(hi[i], b, acc[j][i]);
        }
      } else {
#pragma GCC unroll 16
        for (int i = 0; i < T; ++i) {
          V lo, hi;
          Isa::load_pair<D>(k[i] + c * dtype_bytes(D), lo, hi);
#pragma GCC unroll 16
          for (int j = 0; j < Q; ++j) {
            acc[j][i] = Isa::fma(lo, Isa::load(q + j * d + c), acc[j][i]);
            acc[j][i] = Isa::fma(hi, Isa::load(q + j * d + c + W), acc[j][i]);
          }
        }
      }
    }
    if (c < d) {
#pragma GCC unroll 16
      for (int i = 0; i < T; ++i) {
        const V row = Isa::load_one<D>(k[i] + c * dtype_bytes(D));
#pragma GCC unroll 16
        for (int j = 0; j < Q; ++j) acc[j][i] = Isa::fma(row, Isa::load(q + j * d + c), acc[j][i]);
      }
    }
    Isa::store_sums<Q, T>(acc, s + t, kBlockTokens);
  }
}

// Columns [c, c + N * W) of the running sums of Q queries: acc = acc * rescale + p . v.
template <Dtype D, int Q, int N>
void weigh_tile(const float* p, const float* rescale, int d, int c, const Rows& rows,
                const Rows* ahead, float* acc) {
  constexpr int kBytes = N * W * dtype_bytes(D);
  const int64_t offset = c * dtype_bytes(D);
  const bool new_line = kBytes >= 64 || offset % 64 == 0;
  V sum[Q][N];
#pragma GCC unroll 16
  for (int j = 0; j < Q; ++j)
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) sum[j][i] = Isa::zero();
  for (int t = 0; t < rows.count; ++t) {
    const char* row = rows.v[t] + offset;
    if (ahead != nullptr && new_line && t < ahead->count) {
#pragma GCC unroll 16
      for (int b = 0; b < kBytes; b += 64) Isa::prefetch(ahead->v[t] + offset + b);
    }
    V v[N];
    if constexpr (N == 1) {
      v[0] = Isa::load_one<D>(row);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < N; i += 2)
        Isa::load_pair<D>(row + i * W * dtype_bytes(D), v[i], v[i + 1]);
    }
#pragma GCC unroll 16
    for (int j = 0; j < Q; ++j) {
      const V weight = Isa::set1(p[j * kBlockTokens + t]);
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) sum[j][i] = Isa::fma(v[i], weight, sum[j][i]);
    }
  }
#pragma GCC unroll 16
  for (int j = 0; j < Q; ++j) {
    const V factor = Isa::set1(rescale[j]);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      float* a = acc + j * d + c + i * W;
      Isa::store(a, Isa::fma(Isa::load(a), factor, sum[j][i]));
    }
  }
}

template <Dtype D, int Q>
void weigh_rows(const float* p, const float* rescale, int d, const Rows& rows, const Rows* ahead,
                float* acc) {
  constexpr int N = Isa::kAcc / Q < 8 ? Isa::kAcc / Q : 8;
  int c = 0;
  for (; c + N * W <= d; c += N * W) weigh_tile<D, Q, N>(p, rescale, d, c, rows, ahead, acc);
  for (; c + 2 * W <= d; c += 2 * W) weigh_tile<D, Q, 2>(p, rescale, d, c, rows, ahead, acc);
  if (c < d) weigh_tile<D, Q, 1>(p, rescale, d, c, rows, ahead, acc);
}

// Turns the scores [queries, kBlockTokens] of a group into weights, updates maxima and sums, and
// leaves in `rescale` what brings the sums so far to the new maxima. Three passes over the group
// keep the rows independent: one row at a time is bound by the latency of its reductions.
void soften(float* scores, int queries, int tokens, float* running_max, float* running_sum,
            float* rescale) {
  const int padded = (tokens + W - 1) / W * W;
  for (int j = 0; j < queries; ++j) {
    float* s = scores + j * kBlockTokens;
    for (int t = tokens; t < padded; ++t) s[t] = kNegInf;
    V top = Isa::load(s);
    for (int t = W; t < padded; t += W) top = Isa::max(top, Isa::load(s + t));
    const float block_max = Isa::reduce_max(top);
    const float old_max = running_max[j];
    running_max[j] = old_max > block_max ? old_max : block_max;
    rescale[j] = old_max == running_max[j] ? 0.0f : old_max - running_max[j];
  }
  for (int j = 0; j < queries; j += W) Isa::store(rescale + j, Isa::exp2(Isa::load(rescale + j)));
  for (int j = 0; j < queries; ++j) {
    float* s = scores + j * kBlockTokens;
    // With every score at -inf so far there is nothing to be relative to.
    const V base = Isa::set1(running_max[j] == kNegInf ? 0.0f : running_max[j]);
    V total = Isa::zero();
    for (int t = 0; t < padded; t += W) {
      const V weight = Isa::exp2(Isa::sub(Isa::load(s + t), base));
      Isa::store(s + t, weight);
      total = Isa::add(total, weight);
    }
    running_sum[j] = running_sum[j] * rescale[j] + Isa::reduce_add(total);
  }
}

}  // namespace
}  // namespace cpu_attn
