// The walk of one worker over bf16 rows with bf16 queries, as products of tiles: 16 rows of 64
// bytes, C[16][16] fp32 += A[16][32] bf16 . B[16 pairs][16][2] bf16. Include after isa_avx512.h;
// written once over `Tiles`, which are AMX's or its emulation's.
//
// Turn by turn (kTurnTokens tokens), KV head by KV head (latent rows are one), and group by group
// of up to 16 query heads
//   scores[tokens][heads] = rows . queries   rows are A and load from where they lie, queries are B
//   weights                                  lanes are heads, so the softmax never crosses lanes
//   sums[heads][columns] += weights . values values are paired for B, four tiles of columns at a
//   time
// A weight is the exact sum of three bf16 parts, eight bits each, so nothing is rounded that fp32
// would not round: three products instead of one, where memory is what the time goes to.
#pragma once

#include <type_traits>
#include <utility>

#include "cpu_attn/dispatch.h"
#include "cpu_attn/kernel_states.h"
#include "cpu_attn/tile_layout.h"
#include "cpu_attn/types.h"

namespace cpu_attn {
namespace {

template <class Tiles, int N>
void score_rows(const TileShape& s, const RowTile* rows, const char* queries, Ahead* ahead,
                float* scores) {
  Tiles::template zero<N>();
  for (int step = 0; step < s.steps; ++step) {
    Tiles::template load<4>(queries + step * kTileBytes, kRowBytes);
    const int at = step * kRowBytes;
    Tiles::template load<5>(rows[0].first + at, rows[0].stride);
    Tiles::template multiply<0, 5, 4>();
    if constexpr (N > 1) {
      Tiles::template load<6>(rows[1].first + at, rows[1].stride);
      Tiles::template multiply<1, 6, 4>();
    }
    if constexpr (N > 2) {
      Tiles::template load<7>(rows[2].first + at, rows[2].stride);
      Tiles::template multiply<2, 7, 4>();
    }
    if constexpr (N > 3) {
      Tiles::template load<5>(rows[3].first + at, rows[3].stride);
      Tiles::template multiply<3, 5, 4>();
    }
    if (ahead != nullptr) ahead->fetch();
  }
  Tiles::template store<0>(scores, kRowBytes);
  if constexpr (N > 1) Tiles::template store<1>(scores + kTileFloats, kRowBytes);
  if constexpr (N > 2) Tiles::template store<2>(scores + 2 * kTileFloats, kRowBytes);
  if constexpr (N > 3) Tiles::template store<3>(scores + 3 * kTileFloats, kRowBytes);
}

template <class Tiles>
void score_turn(const TileShape& s, const RowTile* rows, int tiles, const char* queries,
                Ahead* ahead, float* scores) {
  static_assert(kScoreTiles == 4, "one case for each number of tiles");
  for (int i = 0; i < tiles; i += kScoreTiles, rows += kScoreTiles, scores += 4 * kTileFloats)
    switch (tiles - i) {
      case 1:
        score_rows<Tiles, 1>(s, rows, queries, ahead, scores);
        break;
      case 2:
        score_rows<Tiles, 2>(s, rows, queries, ahead, scores);
        break;
      case 3:
        score_rows<Tiles, 3>(s, rows, queries, ahead, scores);
        break;
      default:
        score_rows<Tiles, 4>(s, rows, queries, ahead, scores);
    }
}

// sums += weights . values over one chunk, in tiles 0 to N - 1. All parts of a weight are held, so
// that values are loaded once; between(column) runs beside the products of each tile of columns.
template <class Tiles, int N, class Between>
void sum_chunk(const char* weights, const char* values, const Between& between) {
  Tiles::template load<4>(weights, kRowBytes);
  Tiles::template load<5>(weights + kTileBytes, kRowBytes);
  Tiles::template load<6>(weights + 2 * kTileBytes, kRowBytes);
  static_assert(kParts == 3, "one tile for each part");
  const auto add = [&](auto column) {
    constexpr int kColumn = decltype(column)::value;
    Tiles::template load<7>(values + kColumn * kTileBytes, kRowBytes);
    Tiles::template multiply<kColumn, 4, 7>();
    Tiles::template multiply<kColumn, 5, 7>();
    between(kColumn);
    Tiles::template multiply<kColumn, 6, 7>();
  };
  add(std::integral_constant<int, 0>());
  add(std::integral_constant<int, 1>());
  if constexpr (N > 2) {
    add(std::integral_constant<int, 2>());
    add(std::integral_constant<int, 3>());
  }
}

// acc = acc * rescale + sums, N tiles of columns.
template <int N>
void fold_sums(const float* sums, const float* rescale, int lanes, float* acc, int stride) {
  for (int lane = 0; lane < lanes; ++lane, acc += stride) {
    const V factor = Isa::set1(rescale[lane]);
    for (int i = 0; i < N; ++i) {
      const V sum = Isa::load(sums + i * kTileFloats + lane * 16);
      Isa::store(acc + i * 16, Isa::fma(Isa::load(acc + i * 16), factor, sum));
    }
  }
}

// Tiles [begin, end) of the columns, N at a time. What is stored is loaded again a step later, when
// it has reached the cache: values are paired a chunk ahead, sums are folded N tiles behind.
template <class Tiles, int N>
void sum_columns(const TileScratch& at, const TileTurn& turn, int lanes, int begin, int end,
                 Ahead* ahead, float* acc, int stride) {
  if (begin == end) return;
  const int chunks = (turn.count + kChunk - 1) / kChunk;
  char *values = at.values, *next = values + kSumTiles * kTileBytes;
  float *sums = at.sums, *before = sums + kSumTiles * kTileFloats;
  pair_values<N>(turn, begin, 0, 0, kTileRows, values);
  for (int c = begin; c < end; c += N) {
    Tiles::template zero<N>();
    for (int chunk = 0; chunk < chunks; ++chunk) {
      // The next chunk of these columns, else the first of the next columns.
      const bool here = chunk + 1 < chunks;
      const int next_c = here ? c : c + N, next_chunk = here ? chunk + 1 : 0;
      sum_chunk<Tiles, N>(at.weights + chunk * kParts * kTileBytes, values, [&](int column) {
        constexpr int kRows = kTileRows / N;
        if (ahead != nullptr) ahead->fetch();
        if (next_c < end)
          pair_values<N>(turn, next_c, next_chunk, column * kRows, (column + 1) * kRows, next);
      });
      std::swap(values, next);
    }
    Tiles::template store<0>(sums, kRowBytes);
    Tiles::template store<1>(sums + kTileFloats, kRowBytes);
    if constexpr (N > 2) {
      Tiles::template store<2>(sums + 2 * kTileFloats, kRowBytes);
      Tiles::template store<3>(sums + 3 * kTileFloats, kRowBytes);
    }
    if (c > begin) fold_sums<N>(before, at.rescale, lanes, acc + (c - N) * 16, stride);
    std::swap(sums, before);
  }
  fold_sums<N>(before, at.rescale, lanes, acc + (end - N) * 16, stride);
}

// All groups of a KV head over one turn.
template <class Tiles>
void attend_turn(const Shape& shape, const TileShape& s, const TileScratch& at, int kv_head,
                 const TileTurn& turn, const TileTurn& next, State state) {
  const int tiles = (turn.count + 15) / 16, chunks = (turn.count + kChunk - 1) / kChunk;
  const int most = s.columns / kSumTiles * kSumTiles;
  const int calls = (tiles + kScoreTiles - 1) / kScoreTiles * s.steps + chunks * most;
  Ahead ahead(next.rows, next.fetched, shape.head_dim * 2, calls);
  RowTile rows[kRowTiles];
  for (int r = 0; r < tiles; ++r) rows[r] = find_row_tile(shape, s, turn, r, at.staged);
  for (int g = 0; g < s.groups; ++g) {
    const Lanes lanes(s, kv_head, g);
    Ahead* once = g == 0 ? &ahead : nullptr;
    const char* queries = at.queries + (kv_head * s.groups + g) * s.steps * kTileBytes;
    float* acc = state.acc + lanes.first * shape.value_dim;
    score_turn<Tiles>(s, rows, tiles, queries, once, at.scores);
    weigh_turn(shape.scale_log2, turn.count, at, lanes, state);
    sum_columns<Tiles, kSumTiles>(at, turn, lanes.count, 0, most, once, acc, shape.value_dim);
    sum_columns<Tiles, 2>(at, turn, lanes.count, most, s.columns, nullptr, acc, shape.value_dim);
  }
}

template <class Tiles, bool kLatent>
void accumulate_tiles(const Shape& shape, const Region* regions, const Segment& segment,
                      float* scratch, State state) {
  const TileShape s(shape);
  const TileScratch at(s, scratch);
  const typename Tiles::Session session;
  TileTurn turns[2];
  const auto find = [&](int begin, int head, TileTurn& turn) {
    find_tile_turn<kLatent>(shape, regions, segment, begin, head, turn);
  };
  find(segment.begin, 0, turns[0]);
  fetch_all(turns[0].rows, turns[0].fetched, shape.head_dim * 2);
  clear_state(shape, state);
  pack_query_tiles(shape, s, segment, at.queries);
  for (int t = segment.begin, i = 0; t < segment.end; t += kTurnTokens)
    for (int head = 0; head < s.kv_heads; ++head, i ^= 1) {
      const bool last = head + 1 == s.kv_heads;
      find(last ? t + kTurnTokens : t, last ? 0 : head + 1, turns[i ^ 1]);
      attend_turn<Tiles>(shape, s, at, head, turns[i], turns[i ^ 1], state);
    }
}

// Tiles have 16 lanes: with fewer query heads to a KV head AVX-512 is as fast.
constexpr int kLeastHeads = 8;

template <bool kLatent>
bool uses_tiles(const Shape& shape) {
  const bool fits =
      kLatent || (shape.head_dim % 32 == 0 && shape.q_heads / shape.kv_heads >= kLeastHeads);
  return fits && shape.kv_dtype == Dtype::kBFloat16 && shape.q_dtype == Dtype::kBFloat16;
}

// Tiles where they fit, else AVX-512.
template <class Tiles, bool kLatent>
struct TileAttention {
  static const Attention& other() {
    return kLatent ? kernel_avx512()->latent : kernel_avx512()->heads;
  }
  static size_t scratch_floats(const Shape& shape) {
    return uses_tiles<kLatent>(shape) ? TileScratch::bytes(TileShape(shape)) / 4
                                      : other().scratch_floats(shape);
  }
  static void accumulate(const Shape& shape, const Region* regions, const Segment& segment,
                         float* scratch, State state) {
    if (uses_tiles<kLatent>(shape))
      return accumulate_tiles<Tiles, kLatent>(shape, regions, segment, scratch, state);
    other().accumulate(shape, regions, segment, scratch, state);
  }
  static void finish(const Shape& shape, const State* states, int count, int h, float* out,
                     float* lse) {
    if (uses_tiles<kLatent>(shape)) return finish_tiles(shape, states, count, h, out, lse);
    other().finish(shape, states, count, h, out, lse);
  }
  static constexpr Attention kTable{scratch_floats, accumulate, finish};
};

template <class Tiles>
double multiply_tiles(int64_t rounds) {
  const typename Tiles::Session session;
  Tiles::template zero<4>();
  alignas(64) static const char zeros[kTileBytes] = {};
  Tiles::template load<4>(zeros, kRowBytes);
  Tiles::template load<5>(zeros, kRowBytes);
  for (int64_t i = 0; i < rounds; ++i) {
    Tiles::template multiply<0, 5, 4>();
    Tiles::template multiply<1, 5, 4>();
    Tiles::template multiply<2, 5, 4>();
    Tiles::template multiply<3, 5, 4>();
  }
  return 2.0 * 4 * 16 * 16 * 32 * rounds;
}

template <class Tiles>
const Kernel* tile_kernel() {
  static const Kernel kernel{
      Tiles::kName,
      TileAttention<Tiles, false>::kTable,
      TileAttention<Tiles, true>::kTable,
      kernel_avx512()->read,
      multiply_tiles<Tiles>,
  };
  return &kernel;
}

}  // namespace
}  // namespace cpu_attn
