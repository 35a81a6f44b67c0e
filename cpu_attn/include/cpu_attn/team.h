// Parallel work of one calling thread: decode attention, copies, first touch, the read probe.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu_attn/plan.h"
#include "cpu_attn/types.h"
#include "cpu_attn/workers.h"

namespace cpu_attn {

struct Kv {
  std::vector<Region> regions;
  int32_t page_size = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  bool latent = false;
  Dtype dtype = Dtype::kFloat32;
};

struct DecodeCall {
  std::shared_ptr<const Kv> kv;
  TableView table;
  const Kernel* kernel;
  const char* q;                              // [batch, q_heads, head_dim]
  int64_t q_batch_stride, q_head_stride;      // bytes
  float* out;                                 // [batch, q_heads, value_dim]
  int64_t out_batch_stride, out_head_stride;  // elements
  float* lse;                                 // [batch, q_heads]
  int64_t lse_batch_stride, lse_head_stride;  // elements
  int32_t q_heads;
  Dtype q_dtype;
  float scale;
};

constexpr int kMaxCopyDims = 6;

// dst[i...] = src[i...]; strides in bytes, the innermost dimension is one run of `row_bytes`.
struct CopyPair {
  char* dst;
  const char* src;
  int64_t row_bytes;
  int outer_dims;
  int64_t shape[kMaxCopyDims];
  int64_t dst_stride[kMaxCopyDims];
  int64_t src_stride[kMaxCopyDims];

  int64_t rows() const;
};

// Not thread-safe; the calling thread is worker 0. Every split is fixed by the number of threads.
//
// Work is cut into shares, an equal contiguous run of them for each worker. A worker takes its own
// in order and then what others have left, so a core that another process occupies delays the team
// by one share, not by its whole part.
class Team {
 public:
  Team(int threads, double spin_s);  // as Workers
  int threads() const { return workers_.count(); }

  void decode(const DecodeCall& call);
  void copy(const std::vector<CopyPair>& pairs);
  // Writes a zero to the first byte of every 4 KiB; worker w surely its own part, the w-th.
  void first_touch(char* data, int64_t bytes);
  // Reads `bytes`; returns a checksum that keeps the loads alive.
  uint64_t read(const Kernel* kernel, const char* data, int64_t bytes);
  // The same of `piece_bytes` from each start, fetched some pieces ahead.
  uint64_t read_pieces(const Kernel* kernel, const char* data, const int64_t* starts, int64_t count,
                       int64_t piece_bytes);
  // Every worker multiplies `rounds` rounds in registers.
  void multiply(const Kernel* kernel, int64_t rounds);
  // Binds worker w to cores[w]; returns false when the system refused one.
  bool pin(const std::vector<int>& cores);

 private:
  // Runs work(worker, share) for every share; it may not throw.
  template <class Work>
  void run(int shares, const Work& work);

  float* arena(size_t floats);

  // Fills plan_; with a list for each KV head also regions_, where each head is the only one.
  void plan(const TableView& table, const Kv& kv);

  // The next share of a worker's own run that nobody has taken.
  struct alignas(64) Claim {
    std::atomic<int> next{0};
  };

  struct Free {
    void operator()(float* p) const { std::free(p); }
  };

  Workers workers_;
  std::unique_ptr<Claim[]> claims_;
  Plan plan_;
  std::vector<Region> regions_;
  std::vector<std::vector<uint64_t>> seen_;  // of each worker
  std::unique_ptr<float, Free> arena_;
  size_t arena_floats_ = 0;
};

}  // namespace cpu_attn
