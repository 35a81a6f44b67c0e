#include "cpu_attn/plan.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace cpu_attn {
namespace {

constexpr int64_t kCutTokens = 16;
// A share below this costs more in packed queries and merged states than it evens out.
constexpr int64_t kShareTokens = 512;
constexpr int64_t kMaxSharesPerWorker = 8;
constexpr int64_t kMaxTokens = int64_t{1} << 30;  // token positions are 32-bit

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

void check_counts(const TableView& table, int32_t page_size) {
  if (table.batch > 0 && table.indptr[0] < 0) refuse("indptr[0] = ", table.indptr[0], " < 0");
  for (int64_t b = 0; b < table.batch; ++b) {
    const int64_t first = table.indptr[b], last = table.indptr[b + 1], length = table.lengths[b];
    if (last < first) refuse("indptr not monotone at request ", b, ": ", first, " then ", last);
    if (last > table.entries)
      refuse("indptr[", b + 1, "] = ", last, " exceeds the ", table.entries, " entries");
    if (length < 0 || length > kMaxTokens)
      refuse("lengths[", b, "] = ", length, " is outside [0, ", kMaxTokens, "]");
    const int64_t needed = (length + page_size - 1) / page_size;
    if (needed != last - first)
      refuse("request ", b, ": ", length, " tokens need ", needed, " pages of ", page_size,
             ", the table lists ", last - first);
  }
}

Entry checked_entry(const TableView& table, const std::vector<Region>& regions, int64_t i) {
  const Entry entry{table.region[i], table.page[i], 0};
  if (entry.region < 0 || entry.region >= static_cast<int64_t>(regions.size()))
    refuse("entry ", i, ": region ", entry.region, " of ", regions.size());
  if (entry.page < 0 || entry.page >= regions[entry.region].pages)
    refuse("entry ", i, ": page ", entry.page, " of the ", regions[entry.region].pages,
           " pages of region ", entry.region);
  return entry;
}

void copy_entries(const TableView& table, const std::vector<Region>& regions, Plan& plan) {
  plan.entries.clear();
  plan.first_entry.clear();
  const int64_t first = table.batch > 0 ? table.indptr[0] : 0;
  const int64_t last = table.batch > 0 ? table.indptr[table.batch] : 0;
  plan.entries.reserve(last - first);
  for (int64_t b = 0; b < table.batch; ++b) plan.first_entry.push_back(table.indptr[b] - first);
  for (int64_t i = first; i < last; ++i) plan.entries.push_back(checked_entry(table, regions, i));
}

// Where a share starts, as (request, token).
struct Cut {
  int64_t request;
  int64_t token;
};

Cut find_cut(const std::vector<int64_t>& lengths, const std::vector<int64_t>& starts,
             int64_t position) {
  const int64_t b = std::upper_bound(starts.begin(), starts.end(), position) - starts.begin() - 1;
  if (b >= static_cast<int64_t>(lengths.size())) return {b, 0};
  const int64_t token = (position - starts[b] + kCutTokens / 2) / kCutTokens * kCutTokens;
  return token >= lengths[b] ? Cut{b + 1, 0} : Cut{b, token};
}

void cut_shares(int workers, Plan& plan) {
  const std::vector<int64_t>& lengths = plan.lengths;
  const int64_t requests = lengths.size();
  std::vector<int64_t> starts(requests + 1, 0);
  for (int64_t b = 0; b < requests; ++b) starts[b + 1] = starts[b] + lengths[b];
  const int64_t total = starts[requests];
  const int64_t per_worker =
      std::clamp<int64_t>(total / (workers * kShareTokens), 1, kMaxSharesPerWorker);
  plan.shares = static_cast<int32_t>(workers * per_worker);
  Cut from{0, 0};
  for (int64_t share = 0; share < plan.shares; ++share) {
    plan.first_part.push_back(static_cast<int32_t>(plan.parts.size()));
    const Cut to = share + 1 == plan.shares
                       ? Cut{requests, 0}
                       : find_cut(lengths, starts, total * (share + 1) / plan.shares);
    const auto add = [&](int64_t end) {
      if (from.token < end)
        plan.parts.push_back({static_cast<int32_t>(from.request), static_cast<int32_t>(from.token),
                              static_cast<int32_t>(end), -1});
    };
    for (; from.request < to.request; from = {from.request + 1, 0}) add(lengths[from.request]);
    if (from.token < to.token) {
      add(to.token);
      from = to;
    }
  }
  plan.first_part.push_back(static_cast<int32_t>(plan.parts.size()));
}

void number_slots(Plan& plan) {
  for (size_t i = 0; i < plan.parts.size();) {
    size_t end = i + 1;
    while (end < plan.parts.size() && plan.parts[end].request == plan.parts[i].request) ++end;
    if (end - i > 1) {
      plan.merges.push_back({plan.parts[i].request, plan.slots, static_cast<int32_t>(end - i)});
      for (; i < end; ++i) plan.parts[i].slot = plan.slots++;
    }
    i = end;
  }
  for (size_t b = 0; b < plan.lengths.size(); ++b)
    if (plan.lengths[b] == 0) plan.merges.push_back({static_cast<int32_t>(b), 0, 0});
}

void split(int workers, Plan& plan) {
  plan.parts.clear();
  plan.first_part.clear();
  plan.merges.clear();
  plan.slots = 0;
  cut_shares(workers, plan);
  number_slots(plan);
}

}  // namespace

void make_plan(const TableView& table, const std::vector<Region>& regions, int32_t page_size,
               int workers, Plan& plan) {
  check_counts(table, page_size);
  copy_entries(table, regions, plan);
  plan.lengths.assign(table.lengths, table.lengths + table.batch);
  plan.entry_tokens = page_size;
  split(workers, plan);
}

void begin_lists(const TableView& table, int32_t page_size, int32_t kv_heads, Plan& plan) {
  const BlocksView& blocks = table.blocks;
  const int64_t small = std::min<int64_t>(blocks.tokens, page_size);
  const int64_t large = std::max<int64_t>(blocks.tokens, page_size);
  if (blocks.tokens > kMaxTokens)
    refuse("blocks of ", blocks.tokens, " tokens, at most ", kMaxTokens);
  if (small < 1 || large % small != 0)
    refuse("blocks of ", blocks.tokens, " tokens and pages of ", page_size,
           ": one must be a multiple of the other");
  if (blocks.lists != 1 && blocks.lists != kv_heads)
    refuse(blocks.lists, " lists a request, must be 1 or one for each of ", kv_heads, " KV heads");
  check_counts(table, page_size);
  const int64_t lists = table.batch * blocks.lists;
  int64_t entries = 0;
  plan.first_entry.clear();
  for (int64_t i = 0; i < lists; ++i) {
    plan.first_entry.push_back(entries);
    const int64_t all = (table.lengths[i / blocks.lists] + small - 1) / small;
    entries += std::min(all, blocks.most * (blocks.tokens / small));  // no block twice
  }
  plan.entries.resize(entries);
  plan.entry_tokens = static_cast<int32_t>(small);
  plan.lengths.assign(lists, 0);
  plan.faults.assign(lists, nullptr);
}

void expand_list(const TableView& table, const std::vector<Region>& regions, int32_t page_size,
                 int64_t list, std::vector<uint64_t>& seen, Plan& plan) try {
  const BlocksView& blocks = table.blocks;
  const int64_t b = list / blocks.lists, head = list % blocks.lists;
  const int64_t count = (table.lengths[b] + blocks.tokens - 1) / blocks.tokens;
  const int64_t unit = plan.entry_tokens;
  const int32_t* ids = blocks.ids + list * blocks.most;
  Entry* const first = plan.entries.data() + plan.first_entry[list];
  Entry *next = first, rest{};
  int64_t rest_tokens = 0;
  seen.assign((count + 63) / 64, 0);
  for (int64_t i = 0; i < blocks.most; ++i) {
    const int64_t id = ids[i];
    if (id == -1) continue;
    if (id < 0 || id >= count)
      refuse("request ", b, ", list ", head, ": block ", id, " at ", i, " of the ", count,
             " blocks of its ", table.lengths[b], " tokens");
    const uint64_t bit = uint64_t{1} << (id % 64);
    if (seen[id / 64] & bit)
      refuse("request ", b, ", list ", head, ": block ", id, " is listed twice");
    seen[id / 64] |= bit;
    const int64_t end = std::min<int64_t>((id + 1) * blocks.tokens, table.lengths[b]);
    for (int64_t t = id * blocks.tokens; t < end; t += unit) {
      Entry entry = checked_entry(table, regions, table.indptr[b] + t / page_size);
      entry.region += static_cast<int32_t>(head * regions.size());
      entry.first = static_cast<int32_t>(t % page_size);
      if (end - t >= unit) {
        *next++ = entry;
      } else {  // the request's end: a kernel wants it last
        rest = entry;
        rest_tokens = end - t;
      }
    }
  }
  plan.lengths[list] = (next - first) * unit + rest_tokens;
  if (rest_tokens > 0) *next = rest;
} catch (...) {
  plan.faults[list] = std::current_exception();
}

void end_lists(int workers, Plan& plan) {
  for (const std::exception_ptr& fault : plan.faults)
    if (fault) std::rethrow_exception(fault);
  split(workers, plan);
}

}  // namespace cpu_attn
