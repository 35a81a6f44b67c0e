#include "cpu_attn/team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

namespace cpu_attn {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int64_t kTouchBytes = 4096;
constexpr size_t kLine = 16;  // floats of a cache line
constexpr int kSharesPerWorker = 8;
constexpr int64_t kAheadBytes = 8 << 10;  // fetched ahead of what a probe reads

// Byte at which share i of n starts: on a cache line, so that no two workers write one.
int64_t cut(int64_t bytes, int i, int n) { return i == n ? bytes : bytes * i / n / 64 * 64; }

size_t lines(size_t floats) { return (floats + kLine - 1) / kLine * kLine; }

// What the arena holds: the states of split requests, then each worker's scratch and state.
struct ArenaMap {
  ArenaMap(const Shape& shape, size_t scratch_floats, int slot_count, int worker_count)
      : heads(lines(padded_heads(shape))),
        state(2 * heads + lines(padded_heads(shape) * shape.value_dim)),
        scratch(lines(scratch_floats)),
        slots(slot_count),
        workers(worker_count) {}

  size_t floats() const { return slots * state + workers * (scratch + state); }
  float* scratch_of(float* arena, int worker) const {
    return arena + slots * state + worker * (scratch + state);
  }
  State state_of(float* arena, int worker) const { return at(scratch_of(arena, worker) + scratch); }
  State slot(float* arena, int i) const { return at(arena + i * state); }
  State at(float* p) const { return {p + 2 * heads, p, p + heads}; }

  size_t heads, state, scratch, slots, workers;
};

}  // namespace

Team::Team(int threads, double spin_s)
    : workers_(threads, spin_s), claims_(new Claim[threads]), seen_(threads) {}

template <class Work>
void Team::run(int shares, const Work& work) {
  const int each = shares / threads();
  for (int w = 0; w < threads(); ++w) claims_[w].next = 0;
  workers_.run([&](int me) {
    for (int i = 0; i < threads(); ++i) {
      const int owner = (me + i) % threads();
      for (int n; (n = claims_[owner].next++) < each;) work(me, owner * each + n);
    }
  });
}

float* Team::arena(size_t floats) {
  if (floats > arena_floats_) {
    arena_.reset(static_cast<float*>(std::aligned_alloc(64, floats * sizeof(float))));
    arena_floats_ = arena_ ? floats : 0;
    if (!arena_) throw std::bad_alloc();
  }
  return arena_.get();
}

void Team::plan(const TableView& table, const Kv& kv) {
  if (table.blocks.lists == 0) return make_plan(table, kv.regions, kv.page_size, threads(), plan_);
  begin_lists(table, kv.page_size, kv.kv_heads, plan_);
  const int64_t lists = plan_.lengths.size();
  const auto expand = [&](int w) {
    for (int64_t i = w; i < lists; i += threads())
      expand_list(table, kv.regions, kv.page_size, i, seen_[w], plan_);
  };
  if (lists > 1)
    workers_.run(expand);
  else
    expand(0);
  end_lists(threads(), plan_);
  if (table.blocks.lists == 1) return;
  regions_.clear();
  for (int h = 0; h < kv.kv_heads; ++h)
    for (Region region : kv.regions) {
      region.k += h * region.k_head;
      region.v += h * region.v_head;
      regions_.push_back(region);
    }
}

void Team::decode(const DecodeCall& call) {
  const Kv& kv = *call.kv;
  const Attention& attention = kv.latent ? call.kernel->latent : call.kernel->heads;
  plan(call.table, kv);
  // A list for each KV head makes every KV head with its query heads a request.
  const int lists = std::max(1, static_cast<int>(call.table.blocks.lists));
  const Region* regions = lists == 1 ? kv.regions.data() : regions_.data();
  const int heads = call.q_heads / lists;
  const Shape shape{heads,        kv.kv_heads / lists, kv.head_dim,
                    kv.value_dim, plan_.entry_tokens,  kv.dtype,
                    call.q_dtype, call.scale * kLog2E};
  const ArenaMap map(shape, attention.scratch_floats(shape), plan_.slots, threads());
  float* memory = arena(map.floats());
  std::vector<State> slots;
  for (int i = 0; i < plan_.slots; ++i) slots.push_back(map.slot(memory, i));
  const auto finish = [&](int request, int h, const State* parts, int count) {
    const int64_t b = request / lists, head = request % lists * heads + h;
    attention.finish(shape, parts, count, h,
                     call.out + b * call.out_batch_stride + head * call.out_head_stride,
                     call.lse + b * call.lse_batch_stride + head * call.lse_head_stride);
  };

  const auto attend = [&](int w, int share) {
    for (int i = plan_.first_part[share]; i < plan_.first_part[share + 1]; ++i) {
      const Part& part = plan_.parts[i];
      const int64_t b = part.request / lists, head = part.request % lists * heads;
      const Segment segment{
          call.q + b * call.q_batch_stride + head * call.q_head_stride, call.q_head_stride,
          plan_.entries.data() + plan_.first_entry[part.request], part.begin, part.end};
      const State state = part.slot < 0 ? map.state_of(memory, w) : slots[part.slot];
      attention.accumulate(shape, regions, segment, map.scratch_of(memory, w), state);
      if (part.slot >= 0) continue;
      for (int h = 0; h < heads; ++h) finish(part.request, h, &state, 1);
    }
  };
  run(plan_.shares, attend);
  if (plan_.merges.empty()) return;
  workers_.run([&](int w) {
    const int64_t rows = static_cast<int64_t>(plan_.merges.size()) * heads;
    for (int64_t r = w; r < rows; r += threads()) {
      const Merge& m = plan_.merges[r / heads];
      finish(m.request, static_cast<int>(r % heads), slots.data() + m.first_slot, m.slots);
    }
  });
}

int64_t CopyPair::rows() const {
  int64_t n = 1;
  for (int i = 0; i < outer_dims; ++i) n *= shape[i];
  return n;
}

namespace {

// Copies bytes [begin, end) of the pair, counted along its rows.
void copy_range(const CopyPair& pair, int64_t begin, int64_t end) {
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

}  // namespace

void Team::copy(const std::vector<CopyPair>& pairs) {
  int64_t total = 0;
  for (const CopyPair& pair : pairs) total += pair.rows() * pair.row_bytes;
  const int shares = threads() * kSharesPerWorker;
  run(shares, [&](int, int share) {
    const int64_t begin = cut(total, share, shares), end = cut(total, share + 1, shares);
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
  workers_.run([&](int w) {
    for (int64_t i = pages * w / threads(); i < pages * (w + 1) / threads(); ++i)
      *static_cast<volatile char*>(data + i * kTouchBytes) = 0;
  });
}

uint64_t Team::read_pieces(const Kernel* kernel, const char* data, const int64_t* starts,
                           int64_t count, int64_t piece_bytes) {
  std::atomic<uint64_t> sum{0};
  const int shares = threads() * kSharesPerWorker;
  const int64_t ahead = std::max<int64_t>(1, kAheadBytes / piece_bytes);
  run(shares, [&](int, int share) {
    const int64_t end = count * (share + 1) / shares;
    uint64_t own = 0;
    for (int64_t i = count * share / shares; i < end; ++i) {
      if (i + ahead < end)
        for (int64_t b = 0; b < piece_bytes; b += 64)
          __builtin_prefetch(data + starts[i + ahead] + b, 0, 2);
      own += kernel->read(data + starts[i], piece_bytes);
    }
    sum += own;
  });
  return sum;
}

uint64_t Team::read(const Kernel* kernel, const char* data, int64_t bytes) {
  std::atomic<uint64_t> sum{0};
  const int shares = threads() * kSharesPerWorker;
  run(shares, [&](int, int share) {
    const int64_t begin = cut(bytes, share, shares);
    sum += kernel->read(data + begin, cut(bytes, share + 1, shares) - begin);
  });
  return sum;
}

void Team::multiply(const Kernel* kernel, int64_t rounds) {
  workers_.run([&](int) { kernel->multiply(rounds); });
}

bool Team::pin(const std::vector<int>& cores) {
  std::atomic<bool> granted{true};
  workers_.run([&](int w) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores[w], &set);
    if (pthread_setaffinity_np(pthread_self(), sizeof(set), &set) != 0) granted = false;
  });
  return granted;
}

}  // namespace cpu_attn
