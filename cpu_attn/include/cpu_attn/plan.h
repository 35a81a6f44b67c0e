// Checks one step's page table and splits it over workers. Framework-free.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu_attn/types.h"

namespace cpu_attn {

struct TableView {
  const int32_t* region;   // [entries]
  const int32_t* page;     // [entries]
  const int32_t* indptr;   // [batch + 1]
  const int32_t* lengths;  // [batch]
  int64_t entries;
  int64_t batch;
};

// Tokens [begin, end) of one request. A request inside one share is finished there (slot -1); the
// parts of a split one go to slots that are merged in slot order.
struct Part {
  int32_t request;
  int32_t begin;
  int32_t end;
  int32_t slot;
};

// A request that no single share finishes: its slots [first_slot, first_slot + slots), none when
// the request is empty.
struct Merge {
  int32_t request;
  int32_t first_slot;
  int32_t slots;
};

struct Plan {
  std::vector<Entry> entries;        // checked copies: what is read is what was validated
  std::vector<int64_t> first_entry;  // [batch], into entries
  int32_t shares = 0;                // a multiple of the number of workers
  std::vector<Part> parts;           // in share order
  std::vector<int32_t> first_part;   // [shares + 1]
  std::vector<Merge> merges;
  int32_t slots = 0;
};

// Throws std::invalid_argument, naming the request and the numbers, before any page is read.
// The tokens of all requests, laid end to end, are cut into equal contiguous shares, one to eight a
// worker, cuts moved to a multiple of 16 tokens of a request. Lengths and workers alone decide, so
// the same step gives the same bits whichever worker takes which share.
void make_plan(const TableView& table, const std::vector<Region>& regions, int32_t page_size,
               int workers, Plan& plan);

}  // namespace cpu_attn
