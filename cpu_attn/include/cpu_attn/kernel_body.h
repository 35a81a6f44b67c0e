// The walk of one worker over the tokens of KV heads with keys and values of their own. Include
// after exactly one isa_*.h; everything here has internal linkage.
//
// Turn by turn (kBlockTokens tokens), and head by head within a turn: scores of the whole query
// group, maxima, exponentials, weighted V rows. K and V come from memory once for all queries of
// the group. The sums of a turn start from zero and are folded into the running state at its end,
// which also bounds the rounding error of long sequences.
#pragma once

#include "cpu_attn/kernel_states.h"
#include "cpu_attn/kernel_tiles.h"
#include "cpu_attn/token_rows.h"
#include "cpu_attn/types.h"

namespace cpu_attn {
namespace {

// Two turns of this size fit in the second-level cache of current server cores.
constexpr int64_t kTurnCacheBytes = 256 << 10;

struct Work {
  const Shape& shape;
  const Region* regions;
  const Segment& segment;
  const float* q;  // packed, scaled, [q_heads, head_dim]
  float* scores;   // [group, kBlockTokens]
  float* rescale;  // [group]
  State state;
};

// Up to kBlockTokens tokens of all heads: where head 0 of each lies and how far its next head is.
struct Turn {
  Rows first;
  int64_t k_head[kBlockTokens];
  int64_t v_head[kBlockTokens];
  bool by_token;  // heads lie closer than tokens, and the whole turn fits in the cache twice
};

void find_turn(const Work& work, int begin, Turn& turn) {
  const Shape& shape = work.shape;
  turn.first.count = walk_rows(shape, work.regions, work.segment, begin, kBlockTokens,
                               [&](int t, const Region& r, const char* k, const char* v) {
                                 turn.first.k[t] = k;
                                 turn.first.v[t] = v;
                                 turn.k_head[t] = r.k_head;
                                 turn.v_head[t] = r.v_head;
                               });
  turn.by_token = false;
  if (turn.first.count == 0) return;
  const Region& front = work.regions[work.segment.entries[begin / shape.entry_tokens].region];
  const int64_t row_bytes = shape.head_dim * dtype_bytes(shape.kv_dtype);
  turn.by_token = front.k_head < front.k_token &&
                  2 * kBlockTokens * shape.kv_heads * row_bytes <= kTurnCacheBytes;
}

void rows_of_head(const Turn& turn, int head, Rows& rows) {
  const int count = rows.count = turn.first.count;
  for (int t = 0; t < count; ++t) {
    rows.k[t] = turn.first.k[t] + head * turn.k_head[t];
    rows.v[t] = turn.first.v[t] + head * turn.v_head[t];
  }
  // Score tiles run over whole register tiles; a repeated valid row stands in for the padding.
  for (int t = count; t % Isa::kAcc != 0; ++t) rows.k[t] = rows.k[t - 1];
}

void prefetch_rows(const Rows& rows, int64_t row_bytes) {
  for (int t = 0; t < rows.count; ++t)
    for (int64_t b = 0; b < row_bytes; b += 64) {
      Isa::prefetch(rows.k[t] + b);
      Isa::prefetch(rows.v[t] + b);
    }
}

// The share-th of kv_heads equal shares of a turn, token by token with all heads of each.
void rows_of_share(const Shape& shape, const Turn& turn, int share, Rows& rows) {
  const int begin = share * kBlockTokens;
  int t = begin / shape.kv_heads, head = begin % shape.kv_heads;
  rows.count = 0;
  for (; rows.count < kBlockTokens && t < turn.first.count; ++rows.count) {
    rows.k[rows.count] = turn.first.k[t] + head * turn.k_head[t];
    rows.v[rows.count] = turn.first.v[t] + head * turn.v_head[t];
    if (++head == shape.kv_heads) {
      head = 0;
      ++t;
    }
  }
}

// What to prefetch while `head` of `now` is attended. A turn by token is fetched in memory order
// during the whole turn before it; any other head by head, one head ahead.
void rows_ahead(const Shape& shape, const Turn& now, const Turn& next, int head, Rows& rows) {
  const bool last = head + 1 == shape.kv_heads;
  if (next.by_token) {
    rows_of_share(shape, next, head, rows);
    if (now.by_token || last) return;
    // From one kind to the other: both are due.
    Rows same_turn;
    rows_of_head(now, head + 1, same_turn);
    prefetch_rows(same_turn, shape.head_dim * dtype_bytes(shape.kv_dtype));
  } else if (last) {
    rows_of_head(next, 0, rows);
  } else if (!now.by_token) {
    rows_of_head(now, head + 1, rows);
  } else {
    rows.count = 0;
  }
}

template <Dtype D, int Q>
int score_queries(const Work& work, int head, const Rows& rows, const Rows& ahead, int j) {
  const int d = work.shape.head_dim, group = work.shape.q_heads / work.shape.kv_heads;
  for (; j + Q <= group; j += Q)
    score_tile<D, Q>(work.q + (head * group + j) * d, d, rows, j == 0 ? &ahead : nullptr,
                     work.scores + j * kBlockTokens);
  return j;
}

template <Dtype D, int Q>
int weigh_queries(const Work& work, int head, const Rows& rows, const Rows& ahead, int j) {
  const int d = work.shape.head_dim, group = work.shape.q_heads / work.shape.kv_heads;
  for (; j + Q <= group; j += Q)
    weigh_rows<D, Q>(work.scores + j * kBlockTokens, work.rescale + j, d, rows,
                     j == 0 ? &ahead : nullptr, work.state.acc + (head * group + j) * d);
  return j;
}

template <Dtype D>
void attend_head(const Work& work, int head, const Rows& rows, const Rows& ahead) {
  const int group = work.shape.q_heads / work.shape.kv_heads;
  int j = score_queries<D, 4>(work, head, rows, ahead, 0);
  j = score_queries<D, 2>(work, head, rows, ahead, j);
  score_queries<D, 1>(work, head, rows, ahead, j);
  soften(work.scores, group, rows.count, work.state.max + head * group,
         work.state.sum + head * group, work.rescale);
  j = weigh_queries<D, 4>(work, head, rows, ahead, 0);
  j = weigh_queries<D, 2>(work, head, rows, ahead, j);
  weigh_queries<D, 1>(work, head, rows, ahead, j);
}

template <Dtype D>
void accumulate_as(const Shape& shape, const Region* regions, const Segment& segment,
                   float* scratch, State state) {
  const int group = shape.q_heads / shape.kv_heads;
  float* scores = scratch + static_cast<size_t>(shape.q_heads) * shape.head_dim;
  const Work work{shape, regions, segment, scratch, scores, scores + group * kBlockTokens, state};
  Turn turns[2];
  Rows rows, ahead;
  find_turn(work, segment.begin, turns[0]);
  // Nobody fetched the first turn: the misses of its first rows at least overlap each other and the
  // set-up, the rest is fetched head by head.
  turns[0].by_token = false;
  rows_of_head(turns[0], 0, rows);
  prefetch_rows(rows, shape.head_dim * dtype_bytes(D));
  pack_queries(shape, segment, scratch);
  clear_state(shape, state);
  for (int t = segment.begin, i = 0; t < segment.end; t += kBlockTokens, i ^= 1) {
    find_turn(work, t + kBlockTokens, turns[i ^ 1]);
    for (int head = 0; head < shape.kv_heads; ++head) {
      rows_of_head(turns[i], head, rows);
      rows_ahead(shape, turns[i], turns[i ^ 1], head, ahead);
      attend_head<D>(work, head, rows, ahead);
    }
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

// Packed queries, then one block of scores and one rescale factor per query of a group.
size_t scratch_floats(const Shape& shape) {
  const size_t group = shape.q_heads / shape.kv_heads;
  const size_t queries = static_cast<size_t>(shape.q_heads) * shape.head_dim;
  return queries + group * (kBlockTokens + 1) + kMaxLanes;
}

}  // namespace
}  // namespace cpu_attn
