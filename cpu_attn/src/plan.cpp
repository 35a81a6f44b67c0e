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

void copy_entries(const TableView& table, const std::vector<Region>& regions, Plan& plan) {
  plan.entries.clear();
  plan.first_entry.clear();
  const int64_t first = table.batch > 0 ? table.indptr[0] : 0;
  const int64_t last = table.batch > 0 ? table.indptr[table.batch] : 0;
  plan.entries.reserve(last - first);
  for (int64_t b = 0; b < table.batch; ++b) plan.first_entry.push_back(table.indptr[b] - first);
  for (int64_t i = first; i < last; ++i) {
    const Entry entry{table.region[i], table.page[i]};
    if (entry.region < 0 || entry.region >= static_cast<int64_t>(regions.size()))
      refuse("entry ", i, ": region ", entry.region, " of ", regions.size());
    if (entry.page < 0 || entry.page >= regions[entry.region].pages)
      refuse("entry ", i, ": page ", entry.page, " of the ", regions[entry.region].pages,
             " pages of region ", entry.region);
    plan.entries.push_back(entry);
  }
}

// Where a share starts, as (request, token).
struct Cut {
  int64_t request;
  int64_t token;
};

Cut find_cut(const TableView& table, const std::vector<int64_t>& starts, int64_t position) {
  const int64_t b = std::upper_bound(starts.begin(), starts.end(), position) - starts.begin() - 1;
  if (b >= table.batch) return {table.batch, 0};
  const int64_t token = (position - starts[b] + kCutTokens / 2) / kCutTokens * kCutTokens;
  return token >= table.lengths[b] ? Cut{b + 1, 0} : Cut{b, token};
}

void split(const TableView& table, int workers, Plan& plan) {
  std::vector<int64_t> starts(table.batch + 1, 0);
  for (int64_t b = 0; b < table.batch; ++b) starts[b + 1] = starts[b] + table.lengths[b];
  const int64_t total = starts[table.batch];
  const int64_t per_worker =
      std::clamp<int64_t>(total / (workers * kShareTokens), 1, kMaxSharesPerWorker);
  plan.shares = static_cast<int32_t>(workers * per_worker);
  Cut from{0, 0};
  for (int64_t share = 0; share < plan.shares; ++share) {
    plan.first_part.push_back(static_cast<int32_t>(plan.parts.size()));
    const Cut to = share + 1 == plan.shares
                       ? Cut{table.batch, 0}
                       : find_cut(table, starts, total * (share + 1) / plan.shares);
    const auto add = [&](int64_t end) {
      if (from.token < end)
        plan.parts.push_back({static_cast<int32_t>(from.request), static_cast<int32_t>(from.token),
                              static_cast<int32_t>(end), -1});
    };
    for (; from.request < to.request; from = {from.request + 1, 0})
      add(table.lengths[from.request]);
    if (from.token < to.token) {
      add(to.token);
      from = to;
    }
  }
  plan.first_part.push_back(static_cast<int32_t>(plan.parts.size()));
}

void number_slots(const TableView& table, Plan& plan) {
  for (size_t i = 0; i < plan.parts.size();) {
    size_t end = i + 1;
    while (end < plan.parts.size() && plan.parts[end].request == plan.parts[i].request) ++end;
    if (end - i > 1) {
      plan.merges.push_back({plan.parts[i].request, plan.slots, static_cast<int32_t>(end - i)});
      for (; i < end; ++i) plan.parts[i].slot = plan.slots++;
    }
    i = end;
  }
  for (int64_t b = 0; b < table.batch; ++b)
    if (table.lengths[b] == 0) plan.merges.push_back({static_cast<int32_t>(b), 0, 0});
}

}  // namespace

void make_plan(const TableView& table, const std::vector<Region>& regions, int32_t page_size,
               int workers, Plan& plan) {
  check_counts(table, page_size);
  copy_entries(table, regions, plan);
  plan.parts.clear();
  plan.first_part.clear();
  plan.merges.clear();
  plan.slots = 0;
  split(table, workers, plan);
  number_slots(table, plan);
}

}  // namespace cpu_attn
