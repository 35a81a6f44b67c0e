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

// A run of tokens that lie in one page.
struct Entry {
  int32_t region;
  int32_t page;
  int32_t first;  // token of the page
};

struct Shape {
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;   // elements of a key
  int32_t value_dim;  // of a value: head_dim, or of latent rows the first so many elements of a key
  int32_t entry_tokens;
  Dtype kv_dtype;
  Dtype q_dtype;
  float scale_log2;  // softmax scale times log2(e): scores are kept in base 2
};

// Tokens [begin, end) of one request, all heads, read by one worker.
struct Segment {
  const char* q;          // [q_heads, head_dim], last dim contiguous
  int64_t q_head_stride;  // bytes
  const Entry* entries;   // the request's own in token order, each of entry_tokens but the last
  int32_t begin;
  int32_t end;
};

// Unnormalised softmax state of every query head: weighted V sums, running maximum and sum of
// exp2(score - max). `acc` is in the order of the kernel that wrote it.
struct State {
  float* acc;  // [padded_heads(shape), value_dim]
  float* max;  // [padded_heads(shape)]
  float* sum;  // [padded_heads(shape)]
};

// Every function runs on the calling thread and never throws.
struct Attention {
  size_t (*scratch_floats)(const Shape&);
  // scratch: scratch_floats(shape) floats, 64-byte aligned, as are the arrays of the state.
  void (*accumulate)(const Shape&, const Region*, const Segment&, float* scratch, State);
  // Merges `count` states of one query head in the order given. No state: zeros and -inf.
  void (*finish)(const Shape&, const State* states, int count, int q_head, float* out, float* lse);
};

// One per instruction set; may take functions of a lesser one.
struct Kernel {
  const char* name;
  Attention heads;   // keys and values of their own, each KV head with its group of query heads
  Attention latent;  // one row a token for all query heads, its first elements the value (MLA)
  // Reads every byte once; the return value only keeps the loads alive.
  uint64_t (*read)(const char* data, size_t bytes);
  // Multiplies bf16 in registers the fastest way that `latent` does; returns the FLOPs done.
  double (*multiply)(int64_t rounds);
};

constexpr int kBlockTokens = 64;
constexpr int kMaxHeadDim = 640;  // of a key: 512 + 128 of a latent row
constexpr int kMaxLanes = 16;     // floats of the widest vector

[[maybe_unused]] static size_t padded_heads(const Shape& shape) {
  return static_cast<size_t>(shape.q_heads + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
}

}  // namespace cpu_attn
