// The walk of one worker over latent rows (absorbed MLA): one row a token, shared by all query
// heads, its first value_dim elements also the value. Include after exactly one isa_*.h; everything
// here has internal linkage.
//
// Turn by turn (kBlockTokens tokens): scores in tiles of kTileTokens rows, which stay in the first-
// level cache while every head meets them, then the softmax of all heads, then the weighted sums
// in stripes of columns, each again for every head. So a row comes from memory once, and from the
// second-level cache twice, for any number of heads.
#pragma once

#include "cpu_attn/fetch_ahead.h"
#include "cpu_attn/kernel_states.h"
#include "cpu_attn/kernel_tiles.h"
#include "cpu_attn/token_rows.h"
#include "cpu_attn/types.h"

namespace cpu_attn {
namespace {

constexpr int kTileTokens = 16;
constexpr int kTiles = kBlockTokens / kTileTokens;
static_assert(kTileTokens % Isa::kAcc == 0, "a tile of one query is no longer than the rows");

struct LatentWork {
  const Shape& shape;
  const float* q;  // as packed by the scores that are used
  float* scores;   // [q_heads, kBlockTokens]
  float* rescale;  // [q_heads]
  State state;
};

struct LatentTurn {
  Rows all;
  Rows tiles[kTiles];
};

void find_latent_turn(const Shape& shape, const Region* regions, const Segment& segment, int begin,
                      LatentTurn& turn) {
  const auto put = [&](int t, const Region&, const char* row, const char*) { turn.all.k[t] = row; };
  const int count = walk_rows(shape, regions, segment, begin, kBlockTokens, put);
  turn.all.count = count;
  for (int i = 0; i < kTiles; ++i) {
    Rows& tile = turn.tiles[i];
    const int first = i * kTileTokens;
    tile.count = count <= first ? 0 : (count - first < kTileTokens ? count - first : kTileTokens);
    // A repeated valid row stands in for the padding of a tile.
    for (int t = 0; t < kTileTokens && tile.count > 0; ++t)
      tile.k[t] = turn.all.k[first + (t < tile.count ? t : tile.count - 1)];
  }
  for (int t = 0; t < count; ++t) turn.all.v[t] = turn.all.k[t];
}

// Scores from rows and queries widened to fp32.
template <Dtype D>
struct WideScores {
  static void pack(const Shape& shape, const Segment& segment, float* q) {
    pack_queries(shape, segment, q);
  }
  template <int Q>
  static void tile(const LatentWork& work, int head, const Rows& rows, float* scores) {
    const int d = work.shape.head_dim;
    score_tile<D, Q>(work.q + head * d, d, rows, nullptr, scores);
  }
  static void scale(const LatentWork&, int) {}  // packed into the queries
};

template <class Scores, int Q>
int score_heads(const LatentWork& work, const Rows& rows, int first, Ahead& ahead, int j) {
  for (; j + Q <= work.shape.q_heads; j += Q) {
    ahead.fetch();
    Scores::template tile<Q>(work, j, rows, work.scores + j * kBlockTokens + first);
  }
  return j;
}

template <Dtype D, int Q, int N>
int weigh_heads(const LatentWork& work, const Rows& rows, int c, Ahead& ahead, int j) {
  const int d = work.shape.value_dim;
  for (; j + Q <= work.shape.q_heads; j += Q) {
    ahead.fetch();
    weigh_tile<D, Q, N>(work.scores + j * kBlockTokens, work.rescale + j, d, c, rows, nullptr,
                        work.state.acc + j * d);
  }
  return j;
}

template <Dtype D, int N>
void weigh_stripe(const LatentWork& work, const Rows& rows, int c, Ahead& ahead) {
  int j = weigh_heads<D, 4, N>(work, rows, c, ahead, 0);
  j = weigh_heads<D, 2, N>(work, rows, c, ahead, j);
  weigh_heads<D, 1, N>(work, rows, c, ahead, j);
}

template <Dtype D, class Scores>
void attend_latent(const LatentWork& work, const LatentTurn& now, const LatentTurn& next) {
  constexpr int N = Isa::kAcc / 4;
  const int d = work.shape.value_dim, heads = work.shape.q_heads;
  const int tiles = (now.all.count + kTileTokens - 1) / kTileTokens;
  const int calls = (tiles + d / (N * W)) * ((heads + 3) / 4);
  Ahead ahead(next.all.k, next.all.count, work.shape.head_dim * dtype_bytes(D), calls);
  for (int i = 0; i < tiles; ++i) {
    int j = score_heads<Scores, 4>(work, now.tiles[i], i * kTileTokens, ahead, 0);
    j = score_heads<Scores, 2>(work, now.tiles[i], i * kTileTokens, ahead, j);
    score_heads<Scores, 1>(work, now.tiles[i], i * kTileTokens, ahead, j);
  }
  Scores::scale(work, now.all.count);
  soften(work.scores, heads, now.all.count, work.state.max, work.state.sum, work.rescale);
  int c = 0;
  for (; c + N * W <= d; c += N * W) weigh_stripe<D, N>(work, now.all, c, ahead);
  for (; c < d; c += 2 * W) weigh_stripe<D, 2>(work, now.all, c, ahead);
}

template <Dtype D, class Scores>
void accumulate_latent_as(const Shape& shape, const Region* regions, const Segment& segment,
                          float* scratch, State state) {
  float* scores = scratch + static_cast<size_t>(shape.q_heads) * kMaxHeadDim;
  const LatentWork work{shape, scratch, scores,
                        scores + static_cast<size_t>(shape.q_heads) * kBlockTokens, state};
  LatentTurn turns[2];
  find_latent_turn(shape, regions, segment, segment.begin, turns[0]);
  fetch_all(turns[0].all.k, turns[0].all.count, shape.head_dim * dtype_bytes(D));
  Scores::pack(shape, segment, scratch);
  clear_state(shape, state);
  for (int t = segment.begin, i = 0; t < segment.end; t += kBlockTokens, i ^= 1) {
    find_latent_turn(shape, regions, segment, t + kBlockTokens, turns[i ^ 1]);
    attend_latent<D, Scores>(work, turns[i], turns[i ^ 1]);
  }
}

// Packed queries, then scores and rescale factors of all heads.
size_t latent_scratch_floats(const Shape& shape) {
  return static_cast<size_t>(shape.q_heads) * (kMaxHeadDim + kBlockTokens + 1) + kMaxLanes;
}

}  // namespace
}  // namespace cpu_attn
