// How the tile kernel lays out queries, rows, values, weights and sums; see tile_body.h. Include
// after isa_avx512.h; everything here has internal linkage.
//
// The columns of State::acc are in the order in which pairs interleave them: first and second of
// two tiles take turns of four columns of 32.
#pragma once

#include <cstring>

#include "cpu_attn/fetch_ahead.h"
#include "cpu_attn/kernel_base.h"
#include "cpu_attn/token_rows.h"
#include "cpu_attn/types.h"

namespace cpu_attn {
namespace {

constexpr int kTileBytes = 1024;
constexpr int kTileFloats = kTileBytes / 4;
constexpr int kTileRows = 16;
constexpr int kRowBytes = 64;  // of a tile
constexpr int kChunk = 32;     // tokens of a weights tile
constexpr int kTurnTokens = 128;
constexpr int kChunks = kTurnTokens / kChunk;
constexpr int kRowTiles = kTurnTokens / 16;
constexpr int kParts = 3;  // bf16 parts of a weight
constexpr int kWeightBytes = kChunks * kParts * kTileBytes;
constexpr int kScoreTiles = 4;  // tiles of rows that meet a tile of queries at once
constexpr int kSumTiles = 4;    // tiles of columns that meet a tile of weights at once

struct TileShape {
  explicit TileShape(const Shape& shape)
      : kv_heads(shape.kv_heads),
        heads(shape.q_heads / shape.kv_heads),
        groups((heads + 15) / 16),
        steps((shape.head_dim + 31) / 32),
        columns(shape.value_dim / 16),
        whole(shape.head_dim % 32 == 0) {}
  int kv_heads;  // 1 of latent rows
  int heads;     // query heads of a KV head
  int groups;    // of up to 16 of them: the lanes of a tile, zeros beyond the last
  int steps;     // of 32 elements of a row
  int columns;   // tiles
  bool whole;    // rows end with a step
};

// Query heads that are the lanes of one group of a KV head.
struct Lanes {
  Lanes(const TileShape& s, int kv_head, int group)
      : first(kv_head * s.heads + group * 16),
        count(s.heads - group * 16 < 16 ? s.heads - group * 16 : 16) {}
  __mmask16 mask() const { return static_cast<__mmask16>((1u << count) - 1); }
  int first, count;
};

// Where things lie in the scratch memory; every part is a whole number of tiles.
struct TileScratch {
  TileScratch(const TileShape& s, void* memory)
      : queries(static_cast<char*>(memory)),
        staged(queries + s.kv_heads * s.groups * s.steps * kTileBytes),
        values(staged + kRowTiles * s.steps * kTileBytes),
        weights(values + 2 * kSumTiles * kTileBytes),
        scores(reinterpret_cast<float*>(weights + kWeightBytes)),
        sums(scores + kTurnTokens * 16),
        rescale(sums + 2 * kSumTiles * kTileFloats) {}
  static size_t bytes(const TileShape& s) {
    const size_t tiles =
        s.kv_heads * s.groups * s.steps + kRowTiles * s.steps + kRowTiles + 4 * kSumTiles;
    return tiles * kTileBytes + kWeightBytes + kRowBytes;
  }
  char* queries;   // [kv_heads][groups][steps] tiles of B
  char* staged;    // [kRowTiles][16][steps * 64 bytes]: rows that do not lie as a tile wants them
  char* values;    // [2][kSumTiles] tiles of B
  char* weights;   // [kChunks][kParts] tiles of A, of one group
  float* scores;   // [kTurnTokens][16]
  float* sums;     // [2][kSumTiles] tiles of C
  float* rescale;  // [16]
};

// Sixteen rows of A.
struct RowTile {
  const char* first;
  int64_t stride;
};

// Rows of one KV head: keys, then values if they are not the keys.
struct TileTurn {
  const char* const* values() const { return rows + first_value; }
  int count;
  int fetched;      // rows that come from memory
  int first_value;  // values beyond the last, to the end of its chunk, are zeros
  const char* rows[2 * kTurnTokens];
};

template <bool kLatent>
void find_tile_turn(const Shape& shape, const Region* regions, const Segment& segment, int begin,
                    int head, TileTurn& turn) {
  alignas(64) static const char zeros[kMaxHeadDim * 2] = {};
  // Values follow the keys at once, so that they are fetched in one run.
  const int left = segment.end - begin;
  const int after = left < kTurnTokens ? left : kTurnTokens;
  turn.count = walk_rows(shape, regions, segment, begin, kTurnTokens,
                         [&](int t, const Region& r, const char* k, const char* v) {
                           turn.rows[t] = k + head * r.k_head;
                           if (!kLatent) turn.rows[after + t] = v + head * r.v_head;
                         });
  turn.first_value = kLatent ? 0 : turn.count;
  turn.fetched = kLatent ? turn.count : 2 * turn.count;
  for (int t = turn.count; t % kChunk != 0; ++t) turn.rows[turn.first_value + t] = zeros;
}

void transpose(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// Pairs of 16 heads become the rows of B, heads beyond the last are zero.
void pack_query_tiles(const Shape& shape, const TileShape& s, const Segment& segment, char* tiles) {
  for (int unit = 0; unit < s.kv_heads * s.groups; ++unit) {
    const Lanes lanes(s, unit / s.groups, unit % s.groups);
    for (int step = 0; step < s.steps; ++step, tiles += kTileBytes) {
      const int left = shape.head_dim - 32 * step;
      const __mmask16 mask = left >= 32 ? 0xffff : static_cast<__mmask16>((1u << left / 2) - 1);
      __m512i pairs[16];
      for (int h = 0; h < 16; ++h)
        pairs[h] = h < lanes.count
                       ? _mm512_maskz_loadu_epi32(
                             mask, segment.q + (lanes.first + h) * segment.q_head_stride +
                                       step * kRowBytes)
                       : _mm512_setzero_si512();
      transpose(pairs);
      for (int r = 0; r < 16; ++r) _mm512_store_si512(tiles + r * kRowBytes, pairs[r]);
    }
  }
}

// Rows that follow each other at one distance are used in place, others are copied together.
RowTile find_row_tile(const Shape& shape, const TileShape& s, const TileTurn& turn, int tile,
                      char* staged) {
  const char* const* rows = turn.rows + tile * 16;
  const int count = turn.count - tile * 16 < 16 ? turn.count - tile * 16 : 16;
  bool in_place = s.whole && count == 16;
  const int64_t stride = count > 1 ? rows[1] - rows[0] : 0;
  for (int i = 2; i < count && in_place; ++i) in_place = rows[i] - rows[i - 1] == stride;
  if (in_place) return {rows[0], stride};
  const int64_t bytes = s.steps * kRowBytes;
  staged += tile * 16 * bytes;
  for (int i = 0; i < 16; ++i) {
    const int64_t used = i < count ? shape.head_dim * 2 : 0;
    if (used > 0) std::memcpy(staged + i * bytes, rows[i], used);
    std::memset(staged + i * bytes + used, 0, bytes - used);
  }
  return {staged, bytes};
}

// Rows [first, last) of N tiles of B, which begin with tile c of the columns: tokens 2i and 2i + 1
// of the chunk become row i.
template <int N>
void pair_values(const TileTurn& turn, int c, int chunk, int first, int last, char* tiles) {
  const char* const* rows = turn.values() + chunk * kChunk;
  for (int i = first; i < last; ++i)
    for (int n = 0; n < N; n += 2) {
      const __m512i even = _mm512_loadu_si512(rows[2 * i] + (c + n) * 32);
      const __m512i odd = _mm512_loadu_si512(rows[2 * i + 1] + (c + n) * 32);
      char* to = tiles + n * kTileBytes + i * kRowBytes;
      _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
      _mm512_store_si512(to + kTileBytes, _mm512_unpackhi_epi16(even, odd));
    }
}

// The first eight bits of each lane as bf16, in the upper half; takes them off.
__m512i take_bits(V& weight) {
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(weight), _mm512_set1_epi32(0xffff0000));
  weight = _mm512_sub_ps(weight, _mm512_castsi512_ps(bits));
  return bits;
}

// Softmax of a group, a head a lane: scores become tiles of A, the running maxima and sums go on.
void weigh_turn(float scale, int count, const TileScratch& at, const Lanes& lanes,
                const State& state) {
  float* running_max = state.max + lanes.first;
  float* running_sum = state.sum + lanes.first;
  const V factor = Isa::set1(scale), old_max = _mm512_maskz_loadu_ps(lanes.mask(), running_max);
  V tops[4] = {old_max, old_max, old_max, old_max};
  for (int t = 0; t < count; ++t) {
    const V score = Isa::mul(Isa::load(at.scores + t * 16), factor);
    Isa::store(at.scores + t * 16, score);
    tops[t % 4] = Isa::max(tops[t % 4], score);
  }
  const V top = Isa::max(Isa::max(tops[0], tops[1]), Isa::max(tops[2], tops[3]));
  // Equal maxima may both be -inf.
  const __mmask16 moved = _mm512_cmp_ps_mask(top, old_max, _CMP_NEQ_UQ);
  const V rescale = Isa::exp2(_mm512_maskz_sub_ps(moved, old_max, top));
  // With every score at -inf so far there is nothing to be relative to.
  const __mmask16 any = _mm512_cmp_ps_mask(top, Isa::set1(kNegInf), _CMP_NEQ_UQ);
  const V base = _mm512_maskz_mov_ps(any, top);
  V total[2] = {Isa::zero(), Isa::zero()};
  for (int chunk = 0; chunk * kChunk < count; ++chunk) {
    __m512i parts[kParts][16];
    for (int i = 0; i < 16; ++i) {
      V pair[2];
      for (int odd = 0; odd < 2; ++odd) {
        const int t = chunk * kChunk + 2 * i + odd;
        pair[odd] = Isa::zero();
        if (t < count) pair[odd] = Isa::exp2(Isa::sub(Isa::load(at.scores + t * 16), base));
        total[odd] = Isa::add(total[odd], pair[odd]);
      }
      for (int part = 0; part < kParts; ++part)
        parts[part][i] =
            _mm512_or_si512(_mm512_srli_epi32(take_bits(pair[0]), 16), take_bits(pair[1]));
    }
    for (int part = 0; part < kParts; ++part) {
      transpose(parts[part]);
      char* tile = at.weights + (chunk * kParts + part) * kTileBytes;
      for (int h = 0; h < 16; ++h) _mm512_store_si512(tile + h * kRowBytes, parts[part][h]);
    }
  }
  const V sum = _mm512_maskz_loadu_ps(lanes.mask(), running_sum);
  _mm512_mask_storeu_ps(running_sum, lanes.mask(),
                        Isa::fma(sum, rescale, Isa::add(total[0], total[1])));
  _mm512_mask_storeu_ps(running_max, lanes.mask(), top);
  Isa::store(at.rescale, rescale);
}

void finish_tiles(const Shape& shape, const State* states, int count, int h, float* out,
                  float* lse) {
  float sums[kMaxHeadDim];
  for (int c = 0; c < shape.value_dim; c += 16) Isa::store(sums + c, Isa::zero());
  const auto add = [&](const float* acc, float factor) {
    const float* head = acc + static_cast<size_t>(h) * shape.value_dim;
    for (int c = 0; c < shape.value_dim; c += 16)
      Isa::store(sums + c, Isa::fma(Isa::load(head + c), Isa::set1(factor), Isa::load(sums + c)));
  };
  const V inverse = Isa::set1(merge_states(states, count, h, lse, add));
  const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(8));
  for (int c = 0; c < shape.value_dim; c += 32) {
    const V first = Isa::mul(Isa::load(sums + c), inverse);
    const V second = Isa::mul(Isa::load(sums + c + 16), inverse);
    Isa::store(out + c, _mm512_permutex2var_ps(first, lower, second));
    Isa::store(out + c + 16, _mm512_permutex2var_ps(first, upper, second));
  }
}

}  // namespace
}  // namespace cpu_attn
