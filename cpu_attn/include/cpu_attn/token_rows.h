// Where the rows of a segment's tokens lie: the walk over the page table, for every kernel. Include
// after exactly one isa_*.h; everything here has internal linkage.
#pragma once

#include "cpu_attn/types.h"

namespace cpu_attn {
namespace {

// Calls put(i, region, k, v) for up to `most` tokens from `begin` on, none beyond the segment:
// where head 0 of token begin + i has its key and its value. Returns their number.
template <class Put>
int walk_rows(const Shape& shape, const Region* regions, const Segment& segment, int begin,
              int most, const Put& put) {
  const int left = segment.end - begin;
  const int count = left < most ? left : most;
  if (count <= 0) return 0;
  const Entry* entry = segment.entries + begin / shape.entry_tokens;
  int offset = begin % shape.entry_tokens;
  for (int t = 0; t < count; ++entry, offset = 0) {
    const Region& r = regions[entry->region];
    const int token = entry->first + offset;
    const char* k = r.k + entry->page * r.k_page + token * r.k_token;
    const char* v = r.v + entry->page * r.v_page + token * r.v_token;
    const int run = shape.entry_tokens - offset;
    const int stop = run < count - t ? t + run : count;
    for (; t < stop; ++t, k += r.k_token, v += r.v_token) put(t, r, k, v);
  }
  return count;
}

}  // namespace
}  // namespace cpu_attn
