// Fetching rows ahead. Include after exactly one isa_*.h; everything here has internal linkage.
#pragma once

#include "cpu_attn/kernel_base.h"

namespace cpu_attn {
namespace {

// Spreads the fetching of the next turn's rows evenly over the work on this one. Rows that follow
// each other are one run: a line takes little more than the instruction that fetches it.
class Ahead {
 public:
  Ahead(const char* const* rows, int count, int row_bytes, int calls)
      : row_(rows), end_row_(rows + count), row_bytes_(row_bytes) {
    lines_ = (count * ((row_bytes + 63) / 64) + calls - 1) / calls;
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
  void find_run() {
    at_ = end_ = nullptr;
    if (row_ == end_row_) return;
    at_ = *row_;
    end_ = at_ + row_bytes_;
    while (++row_ != end_row_ && *row_ == end_) end_ += row_bytes_;
  }

  const char *const *row_, *const *end_row_;
  const char *at_, *end_;
  int row_bytes_, lines_;
};

// Nobody fetched the first turn ahead: its misses at least overlap each other and the set-up.
void fetch_all(const char* const* rows, int count, int row_bytes) {
  Ahead(rows, count, row_bytes, 1).fetch();
}

}  // namespace
}  // namespace cpu_attn
