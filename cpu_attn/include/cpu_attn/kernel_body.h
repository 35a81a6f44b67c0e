// The walk of one worker over its tokens, and the merge of partial states. Include after exactly one
// isa_*.h; defines kernel() with internal linkage.
//
// For each block of kBlockTokens tokens and each KV head: scores of the whole query group, block
// maximum, exponentials, weighted V rows. K and V come from memory once for all queries of the
// group. Block sums start from zero and are folded into the running state once a block, which also
// bounds the rounding error of long sequences.
#pragma once

#include "cpu_attn/kernel_tiles.h"
#include "cpu_attn/types.h"

extern "C" float log2f(float);

namespace cpu_attn {
namespace {

// Visits [begin, end) in turns of tokens_per_turn: within a turn head by head, block by block.
struct Walk {
  const Shape& shape;
  int end;
  int turn, head, begin;

  bool done() const { return turn >= end; }
  int turn_end() const {
    return end - turn < shape.tokens_per_turn ? end : turn + shape.tokens_per_turn;
  }
  void advance() {
    const int stop = turn_end();
    begin += kBlockTokens;
    if (begin < stop) return;
    begin = turn;
    if (++head < shape.kv_heads) return;
    head = 0;
    begin = turn = stop;
  }
};

struct Work {
  const Shape& shape;
  const Region* regions;
  const Segment& segment;
  const float* q;  // packed, scaled, [q_heads, head_dim]
  float* scores;   // [group, kBlockTokens]
  float* rescale;  // [group]
  State state;
};

template <Dtype D>
void pack_queries(const Shape& shape, const Segment& segment, float* packed) {
  const int d = shape.head_dim;
  float natural[kMaxHeadDim];
  for (int h = 0; h < shape.q_heads; ++h) {
    const char* q = segment.q + h * segment.q_head_stride;
    if (shape.q_dtype == Dtype::kFloat32) widen_row<Dtype::kFloat32>(q, d, natural);
    if (shape.q_dtype == Dtype::kFloat16) widen_row<Dtype::kFloat16>(q, d, natural);
    if (shape.q_dtype == Dtype::kBFloat16) widen_row<Dtype::kBFloat16>(q, d, natural);
    for (int i = 0; i < d; ++i)
      packed[h * d + packed_index<D>(i, d)] = natural[i] * shape.scale_log2;
  }
}

void fill_block(const Work& work, const Walk& walk, Block& block) {
  const Shape& shape = work.shape;
  const int begin = walk.begin, head = walk.head;
  const int left = walk.turn_end() - begin;
  block.head = head;
  block.tokens = left < kBlockTokens ? left : kBlockTokens;
  const Entry* entry = work.segment.entries + begin / shape.page_size;
  int offset = begin % shape.page_size;
  for (int t = 0; t < block.tokens; ++entry, offset = 0) {
    const Region& r = work.regions[entry->region];
    const char* k = r.k + entry->page * r.k_page + offset * r.k_token + head * r.k_head;
    const char* v = r.v + entry->page * r.v_page + offset * r.v_token + head * r.v_head;
    const int run = shape.page_size - offset;
    const int stop = run < block.tokens - t ? t + run : block.tokens;
    for (; t < stop; ++t, k += r.k_token, v += r.v_token) {
      block.rows.k[t] = k;
      block.rows.v[t] = v;
    }
  }
  // Score tiles run over whole register tiles; a repeated valid row stands in for the padding.
  for (int t = block.tokens; t % Isa::kAcc != 0; ++t) block.rows.k[t] = block.rows.k[t - 1];
}

template <Dtype D, int Q>
int score_queries(const Work& work, const Block& block, int j) {
  const int d = work.shape.head_dim, group = work.shape.q_heads / work.shape.kv_heads;
  for (; j + Q <= group; j += Q) {
    const float* q = work.q + (block.head * group + j) * d;
    float* s = work.scores + j * kBlockTokens;
    if (j == 0) score_tile<D, Q, true>(q, d, block, s);
    else score_tile<D, Q, false>(q, d, block, s);
  }
  return j;
}

template <Dtype D, int Q>
int weigh_queries(const Work& work, const Block& block, const Block* next, int j) {
  const int d = work.shape.head_dim, group = work.shape.q_heads / work.shape.kv_heads;
  for (; j + Q <= group; j += Q) {
    float* acc = work.state.acc + (block.head * group + j) * d;
    weigh_rows<D, Q>(work.scores + j * kBlockTokens, work.rescale + j, d, block,
                     j == 0 ? next : nullptr, acc);
  }
  return j;
}

template <Dtype D>
void attend_block(const Work& work, const Block& block, const Block* next) {
  const int group = work.shape.q_heads / work.shape.kv_heads;
  score_queries<D, 1>(work, block, score_queries<D, 2>(work, block, score_queries<D, 4>(work, block, 0)));
  for (int j = 0; j < group; ++j) {
    const int h = block.head * group + j;
    work.rescale[j] = soften_row(work.scores + j * kBlockTokens, block.tokens,
                                 work.state.max + h, work.state.sum + h);
  }
  weigh_queries<D, 1>(
      work, block, next,
      weigh_queries<D, 2>(work, block, next, weigh_queries<D, 4>(work, block, next, 0)));
}

template <Dtype D>
void accumulate_as(const Shape& shape, const Region* regions, const Segment& segment,
                   float* scratch, State state) {
  const int group = shape.q_heads / shape.kv_heads;
  float* scores = scratch + static_cast<size_t>(shape.q_heads) * shape.head_dim;
  const Work work{shape, regions, segment, scratch, scores, scores + group * kBlockTokens, state};
  pack_queries<D>(shape, segment, scratch);
  for (int h = 0; h < shape.q_heads; ++h) {
    state.max[h] = kNegInf;
    state.sum[h] = 0.0f;
    for (int i = 0; i < shape.head_dim; i += W)
      Isa::store(state.acc + h * shape.head_dim + i, Isa::zero());
  }
  Block blocks[2];
  Walk walk{shape, segment.end, segment.begin, 0, segment.begin};
  if (walk.done()) return;
  fill_block(work, walk, blocks[0]);
  for (int i = 0;; i ^= 1) {
    walk.advance();
    if (walk.done()) return attend_block<D>(work, blocks[i], nullptr);
    fill_block(work, walk, blocks[i ^ 1]);
    attend_block<D>(work, blocks[i], &blocks[i ^ 1]);
  }
}

void accumulate(const Shape& shape, const Region* regions, const Segment& segment, float* scratch,
                State state) {
  switch (shape.kv_dtype) {
    case Dtype::kFloat32:
      return accumulate_as<Dtype::kFloat32>(shape, regions, segment, scratch, state);
    case Dtype::kFloat16:
      return accumulate_as<Dtype::kFloat16>(shape, regions, segment, scratch, state);
    case Dtype::kBFloat16:
      return accumulate_as<Dtype::kBFloat16>(shape, regions, segment, scratch, state);
  }
}

float exp2_one(float x) {
  float lanes[W];
  Isa::store(lanes, Isa::exp2(Isa::set1(x)));
  return lanes[0];
}

void finish(const Shape& shape, const State* states, int count, int h, float* out, float* lse) {
  const int d = shape.head_dim;
  float packed[kMaxHeadDim];
  float top = kNegInf, sum = 0.0f;
  for (int i = 0; i < count; ++i) top = states[i].max[h] > top ? states[i].max[h] : top;
  for (int c = 0; c < d; c += W) Isa::store(packed + c, Isa::zero());
  for (int i = 0; i < count; ++i) {
    if (states[i].max[h] == kNegInf && states[i].sum[h] == 0.0f) continue;
    const float factor = exp2_one(states[i].max[h] - top);
    sum += factor * states[i].sum[h];
    const float* acc = states[i].acc + static_cast<size_t>(h) * d;
    for (int c = 0; c < d; c += W)
      Isa::store(packed + c,
                 Isa::fma(Isa::load(acc + c), Isa::set1(factor), Isa::load(packed + c)));
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  *lse = sum == 0.0f ? kNegInf : top + log2f(sum);
  const bool bf16 = shape.kv_dtype == Dtype::kBFloat16;
  for (int i = 0; i < d; ++i)
    out[i] = inverse * packed[bf16 ? packed_index<Dtype::kBFloat16>(i, d) : i];
}

uint64_t read_bytes(const char* data, size_t bytes) { return Isa::read(data, bytes); }

const Kernel* kernel() {
  static const Kernel kernel{Isa::kName, accumulate, finish, read_bytes};
  return &kernel;
}

}  // namespace
}  // namespace cpu_attn
