// Plain data shared by the planner, the kernels and the binding. No Torch, no FFI, no intrinsics.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpu_attn {

enum class Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// Helpers here have internal linkage: a shared inline function compiled with AVX flags could be the
// copy the linker keeps, and would then run on hosts without AVX.
static constexpr int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// One base pointer pair of a paged KV; strides in bytes, the last dimension is contiguous.
struct Region {
  const char* k;
  const char* v;
  int64_t pages;
  int64_t k_page, k_token, k_head;
  int64_t v_page, v_token, v_head;
};

struct Entry {
  int32_t region;
  int32_t page;
};

struct Shape {
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t page_size;
  Dtype kv_dtype;
  Dtype q_dtype;
  float scale_log2;  // softmax scale times log2(e): scores are kept in base 2
};

// Tokens [begin, end) of one request, all heads, read by one worker.
struct Segment {
  const char* q;          // [q_heads, head_dim], last dim contiguous
  int64_t q_head_stride;  // bytes
  const Entry* entries;   // the request's own, one per page in token order
  int32_t begin;
  int32_t end;
};

// Unnormalised softmax state of every query head: weighted V sums, running maximum and sum of
// exp2(score - max). `acc` is in the lane order of the kernel that wrote it.
struct State {
  float* acc;  // [q_heads, head_dim]
  float* max;  // [q_heads]
  float* sum;  // [q_heads]
};

// One per instruction set; every function runs on the calling thread and never throws.
struct Kernel {
  const char* name;
  // scratch: scratch_floats(shape) floats, 64-byte aligned.
  void (*accumulate)(const Shape&, const Region*, const Segment&, float* scratch, State);
  // Merges `count` states of one query head in the order given. No state: zeros and -inf.
  void (*finish)(const Shape&, const State* states, int count, int q_head, float* out, float* lse);
  // Reads every byte once; the return value only keeps the loads alive.
  uint64_t (*read)(const char* data, size_t bytes);
};

constexpr int kBlockTokens = 64;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxLanes = 16;  // floats of the widest vector

// Packed queries, then one block of scores and one rescale factor per query of a group.
[[maybe_unused]] static size_t scratch_floats(const Shape& shape) {
  const size_t group = shape.q_heads / shape.kv_heads;
  const size_t queries = static_cast<size_t>(shape.q_heads) * shape.head_dim;
  return queries + group * (kBlockTokens + 1) + kMaxLanes;
}

}  // namespace cpu_attn
