// Fetching rows ahead. Include after exactly one isa_*.h; everything here has internal linkage.
#pragma once

#include "cpu_attn/kernel_base.h"

namespace cpu_attn {
namespace {

// Spreads the fetching of the next turn's rows evenly over the work on this one. Rows that follow
// each other are one run: a line takes little more than the instruction that fetches it.
//
// A row on a page of its own costs a walk for the page's address, and a fetch that waits for one
// soon stalls the work. So of scattered rows the first lines come first: their walks overlap.
class Ahead {
 public:
  Ahead(const char* const* rows, int count, int row_bytes, int calls)
      : rows_(rows), row_(rows), end_row_(rows + count), row_bytes_(row_bytes) {
    lines_ = (count * ((row_bytes + 63) / 64) + calls - 1) / calls;
    int jumps = 0;
    for (int i = 1; i < count; ++i) {
      const int64_t step = rows[i] - rows[i - 1];
      jumps += step > kPageBytes || step < -kPageBytes;
    }
    first_lines_ = row_bytes > 64 && 2 * jumps > count;
    find_run();
  }
  void fetch() {
    for (int left = lines_; left > 0 && at_ < end_; find_run()) {
      const int64_t in_run = (end_ - at_ + 63) / 64;
      const int lines = in_run < left ? static_cast<int>(in_run) : left;
#pragma GCC unroll 4
      for (int i = 0; i < lines; ++i) Isa::prefetch(at_ + i * 64);
      at_ += lines * 64;
      left -= lines;
      if (at_ < end_) return;
    }
  }

 private:
  static constexpr int64_t kPageBytes = 4096;

  void find_run() {
    at_ = end_ = nullptr;
    if (row_ == end_row_ && first_lines_) {
      first_lines_ = false;
      row_ = rows_;
      begin_ = 64;
    }
    if (row_ == end_row_) return;
    at_ = *row_ + begin_;
    end_ = *row_ + (first_lines_ ? 64 : row_bytes_);
    const bool whole = !first_lines_ && begin_ == 0;
    while (++row_ != end_row_ && whole && *row_ == end_) end_ += row_bytes_;
  }

  const char *const *rows_, *const *row_, *const *end_row_;
  const char *at_, *end_;
  int row_bytes_, lines_, begin_ = 0;
  bool first_lines_;
};

// Nobody fetched the first turn ahead: its misses at least overlap each other and the set-up.
void fetch_all(const char* const* rows, int count, int row_bytes) {
  Ahead(rows, count, row_bytes, 1).fetch();
}

}  // namespace
}  // namespace cpu_attn
