// Fetching rows ahead. Include after exactly one isa_*.h; everything here has internal linkage.
#pragma once

#include "cpu_attn/kernel_base.h"

namespace cpu_attn {
namespace {

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
