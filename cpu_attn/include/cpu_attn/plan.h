// Checks one step's page table and splits it over workers. Framework-free.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "cpu_attn/types.h"

namespace cpu_attn {

// Block i of a request is its tokens [i, i + 1) * tokens, as far as they go.
struct BlocksView {
  const int32_t* ids;  // [batch, lists, most] in any order, -1 for none
  int64_t lists;       // of a request: one for all KV heads or one for each; 0: every token
  int64_t most;
  int64_t tokens;  // of a block: a multiple of a page's or a part of it
};

struct TableView {
  const int32_t* region;   // [entries]
  const int32_t* page;     // [entries]
  const int32_t* indptr;   // [batch + 1]
  const int32_t* lengths;  // [batch]
  int64_t entries;
  int64_t batch;
  BlocksView blocks;
};

// Tokens [begin, end) of what one request attends. A request inside one share is finished there
// (slot -1); the parts of a split one go to slots that are merged in slot order.
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

// With lists of blocks every list counts as a request.
struct Plan {
  std::vector<Entry> entries;        // checked copies: what is read is what was validated
  std::vector<int64_t> first_entry;  // [requests], into entries
  std::vector<int64_t> lengths;      // [requests], tokens attended
  int32_t entry_tokens = 0;
  int32_t shares = 0;               // a multiple of the number of workers
  std::vector<Part> parts;          // in share order
  std::vector<int32_t> first_part;  // [shares + 1]
  std::vector<Merge> merges;
  int32_t slots = 0;
  std::vector<std::exception_ptr> faults;  // [requests], of lists of blocks
};

// Plans a table without lists. Throws std::invalid_argument, naming the request and the numbers,
// before any page is read. The tokens of all requests, laid end to end, are cut into equal
// contiguous shares, one to eight a worker, cuts moved to a multiple of 16 tokens of a request.
// Lengths and workers alone decide, so the same step gives the same bits whichever worker takes
// which share.
void make_plan(const TableView& table, const std::vector<Region>& regions, int32_t page_size,
               int workers, Plan& plan);

// A table with lists is planned in three steps, and only pages that a listed block lies in are
// checked. Entries of list h of a request refer to region + h * regions.
void begin_lists(const TableView& table, int32_t page_size, int32_t kv_heads, Plan& plan);
// For each list, by any thread; a fault is kept for the last step. `seen` is scratch memory.
void expand_list(const TableView& table, const std::vector<Region>& regions, int32_t page_size,
                 int64_t list, std::vector<uint64_t>& seen, Plan& plan);
// Throws the first fault, or splits.
void end_lists(int workers, Plan& plan);

}  // namespace cpu_attn
