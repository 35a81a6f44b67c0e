#include "cpu_attn/team.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

namespace cpu_attn {
namespace {

constexpr int64_t kTouchBytes = 4096;
constexpr size_t kLine = 16;  // floats of a cache line

size_t lines(size_t floats) { return (floats + kLine - 1) / kLine * kLine; }

// Calls f(worker) for every worker and returns when all are done. f must not throw.
template <class F>
void for_each_worker(int threads, const F& f) {
  if (threads == 1) return f(0);
#pragma omp parallel num_threads(threads)
  for (int w = omp_get_thread_num(); w < threads; w += omp_get_num_threads()) f(w);
}

}  // namespace

float* Team::arena(size_t floats) {
  if (floats > arena_floats_) {
    arena_.reset(static_cast<float*>(std::aligned_alloc(64, floats * sizeof(float))));
    arena_floats_ = arena_ ? floats : 0;
    if (!arena_) throw std::bad_alloc();
  }
  return arena_.get();
}

void Team::decode(const DecodeCall& call) {
  const Kv& kv = *call.kv;
  const Kernel& kernel = *call.kernel;
  make_plan(call.table, kv.regions, kv.page_size, threads_, plan_);
  const Shape shape{call.q_heads,  kv.kv_heads, kv.head_dim, kv.page_size, kv.dtype,
                    call.q_dtype, call.scale * 1.4426950408889634f};

  const size_t heads = lines(call.q_heads);
  const size_t state_floats = lines(static_cast<size_t>(call.q_heads) * kv.head_dim) + 2 * heads;
  const size_t scratch = lines(scratch_floats(shape));
  const size_t per_worker = scratch + state_floats;
  float* slots = arena(threads_ * per_worker + plan_.slots * state_floats);
  float* workers = slots + plan_.slots * state_floats;
  const auto state_at = [&](float* p) {
    float* acc = p + 2 * heads;
    return State{acc, p, p + heads};
  };
  std::vector<State> states;
  for (int i = 0; i < plan_.slots; ++i) states.push_back(state_at(slots + i * state_floats));
  const auto finish = [&](int64_t b, int h, const State* parts, int count) {
    kernel.finish(shape, parts, count, h,
                  call.out + b * call.out_batch_stride + h * call.out_head_stride,
                  call.lse + b * call.lse_batch_stride + h * call.lse_head_stride);
  };

  const auto attend = [&](int w) {
    float* mine = workers + w * per_worker;
    for (int i = plan_.first_part[w]; i < plan_.first_part[w + 1]; ++i) {
      const Part& part = plan_.parts[i];
      const Segment segment{call.q + part.request * call.q_batch_stride, call.q_head_stride,
                            plan_.entries.data() + plan_.first_entry[part.request], part.begin,
                            part.end};
      const State state = part.slot < 0 ? state_at(mine + scratch) : states[part.slot];
      kernel.accumulate(shape, kv.regions.data(), segment, mine, state);
      if (part.slot >= 0) continue;
      for (int h = 0; h < call.q_heads; ++h) finish(part.request, h, &state, 1);
    }
  };
  const auto merge = [&](int w) {
    const int64_t rows = static_cast<int64_t>(plan_.merges.size()) * call.q_heads;
    for (int64_t r = w; r < rows; r += threads_) {
      const Merge& m = plan_.merges[r / call.q_heads];
      finish(m.request, static_cast<int>(r % call.q_heads), states.data() + m.first_slot, m.slots);
    }
  };
  for_each_worker(threads_, attend);
  if (!plan_.merges.empty()) for_each_worker(threads_, merge);
}

int64_t CopyPair::rows() const {
  int64_t n = 1;
  for (int i = 0; i < outer_dims; ++i) n *= shape[i];
  return n;
}

// Copies bytes [begin, end) of the pair, counted along its rows.
static void copy_range(const CopyPair& pair, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end;) {
    int64_t row = at / pair.row_bytes, dst = 0, src = 0;
    const int64_t offset = at - row * pair.row_bytes;
    for (int i = pair.outer_dims - 1; i >= 0; --i) {
      const int64_t index = row % pair.shape[i];
      row /= pair.shape[i];
      dst += index * pair.dst_stride[i];
      src += index * pair.src_stride[i];
    }
    const int64_t n = std::min(pair.row_bytes - offset, end - at);
    std::memcpy(pair.dst + dst + offset, pair.src + src + offset, n);
    at += n;
  }
}

void Team::copy(const std::vector<CopyPair>& pairs) {
  int64_t total = 0;
  for (const CopyPair& pair : pairs) total += pair.rows() * pair.row_bytes;
  for_each_worker(threads_, [&](int w) {
    // Cuts on cache lines, so that no two workers write one.
    const int64_t begin = total * w / threads_ / 64 * 64;
    const int64_t end = w + 1 == threads_ ? total : total * (w + 1) / threads_ / 64 * 64;
    int64_t start = 0;
    for (const CopyPair& pair : pairs) {
      const int64_t bytes = pair.rows() * pair.row_bytes;
      const int64_t from = std::max(begin, start), to = std::min(end, start + bytes);
      if (from < to) copy_range(pair, from - start, to - start);
      start += bytes;
    }
  });
}

void Team::first_touch(char* data, int64_t bytes) {
  const int64_t pages = (bytes + kTouchBytes - 1) / kTouchBytes;
  for_each_worker(threads_, [&](int w) {
    for (int64_t i = pages * w / threads_; i < pages * (w + 1) / threads_; ++i)
      *static_cast<volatile char*>(data + i * kTouchBytes) = 0;
  });
}

uint64_t Team::read(const Kernel* kernel, const char* data, int64_t bytes) {
  std::atomic<uint64_t> sum{0};
  for_each_worker(threads_, [&](int w) {
    const int64_t begin = bytes * w / threads_ / 64 * 64;
    const int64_t end = w + 1 == threads_ ? bytes : bytes * (w + 1) / threads_ / 64 * 64;
    sum += kernel->read(data + begin, end - begin);
  });
  return sum;
}

bool Team::pin(const std::vector<int>& cores) {
  std::atomic<bool> granted{true};
  for_each_worker(threads_, [&](int w) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores[w], &set);
    if (pthread_setaffinity_np(pthread_self(), sizeof(set), &set) != 0) granted = false;
  });
  return granted;
}

}  // namespace cpu_attn
