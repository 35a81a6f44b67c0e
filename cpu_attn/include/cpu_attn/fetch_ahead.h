// Fetching rows ahead. Include after exactly one isa_*.h; everything here has internal linkage.
#pragma once

#include "cpu_attn/kernel_base.h"

namespace cpu_attn {
namespace {

// Spreads the fetching of the next turn's rows evenly over the work on this one.
//
// A row on a page of its own costs a walk for the page's address, and a fetch that waits for one
// soon stalls the work. So of scattered rows the first lines come first: their walks overlap.
class Ahead {
 public:
  Ahead(const char* const* rows, int count, int row_bytes, int calls)
      : rows_(rows), count_(count), row_bytes_(row_bytes) {
    lines_ = (count * ((row_bytes + 63) / 64) + calls - 1) / calls;
    int jumps = 0;
    for (int i = 1; i < count; ++i) {
      const int64_t step = rows[i] - rows[i - 1];
      jumps += step > kPageBytes || step < -kPageBytes;
    }
    first_lines_ = row_bytes > 64 && 2 * jumps > count;
  }
  void fetch() {
    for (int i = 0; i < lines_ && row_ < count_; ++i) {
      Isa::prefetch(rows_[row_] + byte_);
      if (first_lines_) {
        if (++row_ < count_) continue;
        first_lines_ = false;
        row_ = 0;
        begin_ = byte_ = 64;
      } else if ((byte_ += 64) >= row_bytes_) {
        byte_ = begin_;
        ++row_;
      }
    }
  }

 private:
  static constexpr int64_t kPageBytes = 4096;

  const char* const* rows_;
  int count_, row_bytes_, lines_, row_ = 0, byte_ = 0, begin_ = 0;
  bool first_lines_;
};

// Nobody fetched the first turn ahead: its misses at least overlap each other and the set-up.
void fetch_all(const char* const* rows, int count, int row_bytes) {
  Ahead(rows, count, row_bytes, 1).fetch();
}

}  // namespace
}  // namespace cpu_attn
