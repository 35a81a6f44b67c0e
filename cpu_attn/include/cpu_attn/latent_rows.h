// Where latent rows lie, and fetching them ahead. Include after exactly one isa_*.h; everything
// here has internal linkage.
#pragma once

#include "cpu_attn/kernel_base.h"
#include "cpu_attn/types.h"

namespace cpu_attn {
namespace {

// Rows of up to `most` tokens from `begin` on, none beyond the segment. Returns their number.
int find_latent_rows(const Shape& shape, const Region* regions, const Segment& segment, int begin,
                     int most, const char** rows) {
  const int left = segment.end - begin;
  const int count = left < most ? left : most;
  if (count <= 0) return 0;
  const Entry* entry = segment.entries + begin / shape.page_size;
  int offset = begin % shape.page_size;
  for (int t = 0; t < count; ++entry, offset = 0) {
    const Region& r = regions[entry->region];
    const char* row = r.k + entry->page * r.k_page + offset * r.k_token;
    const int run = shape.page_size - offset;
    const int stop = run < count - t ? t + run : count;
    for (; t < stop; ++t, row += r.k_token) rows[t] = row;
  }
  return count;
}

// Spreads the fetching of the next turn's rows evenly over the work on this one.
class Ahead {
 public:
  Ahead(const char* const* rows, int count, int row_bytes, int calls)
      : rows_(rows), count_(count), row_bytes_(row_bytes) {
    lines_ = (count * ((row_bytes + 63) / 64) + calls - 1) / calls;
  }
  void fetch() {
    for (int i = 0; i < lines_ && row_ < count_; ++i) {
      Isa::prefetch(rows_[row_] + byte_);
      if ((byte_ += 64) >= row_bytes_) {
        byte_ = 0;
        ++row_;
      }
    }
  }

 private:
  const char* const* rows_;
  int count_, row_bytes_, lines_, row_ = 0, byte_ = 0;
};

// Nobody fetched the first turn ahead: its misses at least overlap each other and the set-up.
void fetch_all(const char* const* rows, int count, int row_bytes) {
  Ahead(rows, count, row_bytes, 1).fetch();
}

}  // namespace
}  // namespace cpu_attn
