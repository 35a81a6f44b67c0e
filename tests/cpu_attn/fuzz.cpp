// Random shapes, strides, page tables, lengths and lists of blocks through every kernel of this
// host, to be built with sanitizers: fuzz SECONDS [SEED]. Every buffer ends with its last row, so
// that the address sanitizer sees what is read beyond. Tokens that no request lists are NaN. All
// kernels must agree with the scalar one, and a broken table must be refused. Prints the seed of
// what failed and exits with 1.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_attn/dispatch.h"
#include "cpu_attn/team.h"

namespace {

using cpu_attn::DecodeCall;
using cpu_attn::Dtype;
using cpu_attn::Kernel;
using cpu_attn::Kv;
using cpu_attn::Region;
using cpu_attn::Team;

constexpr double kTolerance = 3e-5;  // of sums in another order; values are of order one

struct Random {
  explicit Random(uint64_t seed) : engine(seed) {}
  int upto(int least, int most) { return std::uniform_int_distribution<int>(least, most)(engine); }
  bool chance(double p) { return std::bernoulli_distribution(p)(engine); }
  template <class T>
  T of(const std::vector<T>& choices) {
    return choices[upto(0, static_cast<int>(choices.size()) - 1)];
  }
  float normal() { return std::normal_distribution<float>()(engine); }
  std::mt19937_64 engine;
};

void put(char* at, Dtype dtype, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (dtype == Dtype::kFloat32) {
    std::memcpy(at, &bits, 4);
    return;
  }
  uint16_t half = static_cast<uint16_t>(bits >> 16);
  if (dtype == Dtype::kFloat16) {
    const uint32_t exponent = (bits >> 23) & 0xff;
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    half = exponent == 0xff ? static_cast<uint16_t>(sign | 0x7e00)
           : exponent < 113
               ? sign
               : static_cast<uint16_t>(sign | ((exponent - 112) << 10) | ((bits >> 13) & 0x3ff));
  }
  std::memcpy(at, &half, 2);
}

// [pages, page_size, heads, width], dimensions in a random order and with random gaps.
struct Paged {
  std::unique_ptr<char[]> data;
  int64_t page, token, head;

  Paged(Random& random, int pages, int page_size, int heads, int width, Dtype dtype) {
    const int64_t row = width * cpu_attn::dtype_bytes(dtype);
    const auto gap = [&](int64_t bytes) {
      return bytes + (random.chance(0.3) ? cpu_attn::dtype_bytes(dtype) * random.upto(1, 40) : 0);
    };
    const bool by_head = random.chance(0.5);
    const int inner = by_head ? page_size : heads, outer = by_head ? heads : page_size;
    const int64_t near = gap(row), far = gap(near * (inner - 1) + row);
    page = gap(far * (outer - 1) + near * (inner - 1) + row);
    token = by_head ? near : far;
    head = by_head ? far : near;
    const int64_t bytes = page * (pages - 1) + far * (outer - 1) + near * (inner - 1) + row;
    data.reset(new char[bytes]);
    std::memset(data.get(), 0xff, bytes);  // NaN in every dtype
  }
};

struct Problem {
  explicit Problem(uint64_t seed) : random(seed) {
    latent = random.chance(0.4);
    kv = std::make_shared<Kv>();
    kv->dtype =
        random.of<Dtype>({Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16, Dtype::kBFloat16});
    q_dtype =
        random.chance(0.7) ? kv->dtype : random.of<Dtype>({Dtype::kFloat32, Dtype::kBFloat16});
    kv->latent = latent;
    kv->kv_heads = latent ? 1 : random.upto(1, 3);
    q_heads = kv->kv_heads * random.of<int>({1, 2, 3, 4, 7, 8, 9, 16, 20});
    kv->value_dim =
        latent ? 32 * random.upto(1, 16) : random.of<int>({64, 80, 96, 112, 128, 192, 256});
    kv->head_dim = latent ? kv->value_dim + 16 * random.upto(0, 8) : kv->value_dim;
    kv->page_size = random.of<int>({1, 2, 7, 16, 63, 64, 65, 128, 256});
    for (int i = random.upto(1, 3); i > 0; --i) add_region();
    make_table();
    if (random.chance(0.4)) make_lists();
    q.reset(new char[static_cast<size_t>(batch) * q_heads * kv->head_dim * q_bytes()]);
    for (int64_t i = 0; i < static_cast<int64_t>(batch) * q_heads * kv->head_dim; ++i)
      put(q.get() + i * q_bytes(), q_dtype, random.normal());
  }

  void add_region() {
    const int pages = random.upto(1, 6);
    Paged k(random, pages, kv->page_size, kv->kv_heads, kv->head_dim, kv->dtype);
    Region region{k.data.get(), k.data.get(), pages,   k.page, k.token,
                  k.head,       k.page,       k.token, k.head};
    buffers.push_back(std::move(k.data));
    if (!latent) {
      Paged v(random, pages, kv->page_size, kv->kv_heads, kv->value_dim, kv->dtype);
      region.v = v.data.get();
      region.v_page = v.page;
      region.v_token = v.token;
      region.v_head = v.head;
      buffers.push_back(std::move(v.data));
    }
    kv->regions.push_back(region);
  }

  void make_table() {
    batch = random.upto(0, 5);
    indptr.push_back(0);
    for (int b = 0; b < batch; ++b) {
      const int length = random.chance(0.15) ? 0 : random.upto(1, random.chance(0.3) ? 900 : 70);
      const int pages = (length + kv->page_size - 1) / kv->page_size;
      lengths.push_back(length);
      for (int i = 0; i < pages; ++i) {
        region.push_back(random.upto(0, static_cast<int>(kv->regions.size()) - 1));
        page.push_back(random.upto(0, static_cast<int>(kv->regions[region.back()].pages) - 1));
        const int last = length - i * kv->page_size;
        fill(kv->regions[region.back()], page.back(), last < kv->page_size ? last : kv->page_size);
      }
      indptr.push_back(static_cast<int32_t>(page.size()));
    }
  }

  // Some blocks of each request in random order, with -1 between.
  void make_lists() {
    const int page_size = kv->page_size;
    std::vector<int> sizes{page_size, 2 * page_size, 1};
    for (int size : {8, 32, 13})
      if (page_size % size == 0) sizes.push_back(size);
    block_tokens = random.of(sizes);
    lists = random.chance(0.5) ? 1 : kv->kv_heads;
    most = random.upto(0, 40);
    for (int i = 0; i < batch * lists; ++i) {
      std::vector<int32_t> all;
      for (int block = 0; block * block_tokens < lengths[i / lists]; ++block) all.push_back(block);
      std::shuffle(all.begin(), all.end(), random.engine);
      for (int n = 0; n < most; ++n) {
        const bool none = all.empty() || random.chance(0.2);
        blocks.push_back(none ? -1 : all.back());
        if (!none) all.pop_back();
      }
    }
  }

  // As break_table, where there are lists.
  const char* break_lists() {
    if (blocks.empty()) return nullptr;
    const int at = random.upto(0, static_cast<int>(blocks.size()) - 1);
    const int length = lengths[at / most / lists];
    switch (random.upto(0, 3)) {
      case 0:
        blocks[at] = (length + block_tokens - 1) / block_tokens + random.upto(0, 1 << 20);
        return "a block beyond the request";
      case 1:
        blocks[at] = -random.upto(2, 1 << 20);
        return "a negative block";
      case 2: {
        const int other = at % most == 0 ? at + 1 : at - 1;
        if (most < 2 || blocks[other] == -1) return nullptr;
        blocks[at] = blocks[other];
        return "a block listed twice";
      }
      default:
        lists += kv->kv_heads + 1;
        return "more lists than KV heads";
    }
  }

  void fill(const Region& r, int page, int tokens) {
    const int64_t bytes = cpu_attn::dtype_bytes(kv->dtype);
    for (int t = 0; t < tokens; ++t)
      for (int h = 0; h < kv->kv_heads; ++h) {
        char* k = const_cast<char*>(r.k) + page * r.k_page + t * r.k_token + h * r.k_head;
        char* v = const_cast<char*>(r.v) + page * r.v_page + t * r.v_token + h * r.v_head;
        for (int i = 0; i < kv->head_dim; ++i) put(k + i * bytes, kv->dtype, random.normal());
        if (latent) continue;
        for (int i = 0; i < kv->value_dim; ++i) put(v + i * bytes, kv->dtype, random.normal());
      }
  }

  // Returns what was broken, nullptr where there is nothing to break.
  const char* break_table() {
    if (batch == 0 || page.empty()) return nullptr;
    const int entry = random.upto(0, static_cast<int>(page.size()) - 1),
              b = random.upto(0, batch - 1);
    switch (random.upto(0, 6)) {
      case 0:
        page[entry] =
            static_cast<int32_t>(kv->regions[region[entry]].pages) + random.upto(0, 1 << 20);
        return "a page beyond its region";
      case 1:
        page[entry] = -random.upto(1, 1 << 20);
        return "a negative page";
      case 2:
        region[entry] = static_cast<int32_t>(kv->regions.size()) + random.upto(0, 1 << 20);
        return "an unknown region";
      case 3:
        region[entry] = -random.upto(1, 1 << 20);
        return "a negative region";
      case 4:
        lengths[b] += kv->page_size * random.upto(1, 1 << 16);
        return "a length beyond its pages";
      case 5:
        lengths[b] = -random.upto(1, 1 << 20);
        return "a negative length";
      default:
        indptr[batch] += random.upto(1, 1 << 20);
        return "entries beyond the table";
    }
  }

  int64_t q_bytes() const { return cpu_attn::dtype_bytes(q_dtype); }

  void decode(const Kernel* kernel, Team& team, std::vector<float>& out,
              std::vector<float>& lse) const {
    const int64_t heads = q_heads, width = kv->value_dim;
    out.assign(batch * heads * width, NAN);
    lse.assign(batch * heads, NAN);
    DecodeCall call{};
    call.kv = kv;
    call.table = {region.data(),
                  page.data(),
                  indptr.data(),
                  lengths.data(),
                  static_cast<int64_t>(page.size()),
                  batch,
                  {blocks.data(), lists, most, block_tokens}};
    call.kernel = kernel;
    call.q = q.get();
    call.q_batch_stride = heads * kv->head_dim * q_bytes();
    call.q_head_stride = kv->head_dim * q_bytes();
    call.out = out.data();
    call.out_batch_stride = heads * width;
    call.out_head_stride = width;
    call.lse = lse.data();
    call.lse_batch_stride = heads;
    call.lse_head_stride = 1;
    call.q_heads = q_heads;
    call.q_dtype = q_dtype;
    call.scale = 1.0f / std::sqrt(static_cast<float>(kv->head_dim));
    team.decode(call);
  }

  Random random;
  bool latent;
  std::shared_ptr<Kv> kv;
  Dtype q_dtype;
  int q_heads, batch;
  int lists = 0, most = 0, block_tokens = 0;
  std::vector<std::unique_ptr<char[]>> buffers;
  std::vector<int32_t> region, page, indptr, lengths, blocks;
  std::unique_ptr<char[]> q;
};

bool close(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!(a[i] == b[i] || std::abs(a[i] - b[i]) <= kTolerance * (1.0 + std::abs(b[i]))))
      return false;
  return true;
}

// Returns what went wrong, "" if nothing.
std::string check(uint64_t seed, const std::vector<const Kernel*>& kernels,
                  std::vector<std::unique_ptr<Team>>& teams) {
  Problem problem(seed);
  std::vector<float> out, lse, expected, expected_lse;
  const char* broken = nullptr;
  if (problem.random.chance(0.25))
    broken = problem.lists > 0 ? problem.break_lists() : problem.break_table();
  Team& team = *teams[problem.random.upto(0, static_cast<int>(teams.size()) - 1)];
  for (const Kernel* kernel : kernels) {
    try {
      problem.decode(kernel, team, out, lse);
    } catch (const std::invalid_argument& error) {
      if (broken == nullptr) return std::string(kernel->name) + " refused: " + error.what();
      continue;
    }
    if (broken != nullptr) return std::string(kernel->name) + " took " + broken;
    if (kernel == kernels.front()) {
      expected = out;
      expected_lse = lse;
    }
    if (!close(out, expected) || !close(lse, expected_lse))
      return std::string(kernel->name) + " differs from " + kernels.front()->name;
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10.0;
  uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  std::vector<const Kernel*> kernels;
  for (int i = 0; const Kernel* kernel = cpu_attn::supported_kernel(i); ++i) {
    // By name, since that asks the system for AMX's tiles, which it may refuse.
    if (const Kernel* found = cpu_attn::find_kernel(kernel->name))
      kernels.push_back(found);
    else
      std::printf("%s is refused here\n", kernel->name);
  }
  if (const Kernel* emulated = cpu_attn::find_kernel("amx-emulated")) kernels.push_back(emulated);
  std::vector<std::unique_ptr<Team>> teams;
  for (int threads = 1; threads <= 4; ++threads) teams.emplace_back(new Team(threads, 0.0));
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  const uint64_t first = seed;
  for (; seed == first || std::chrono::steady_clock::now() < end; ++seed) {
    const std::string wrong = check(seed, kernels, teams);
    if (wrong.empty()) continue;
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), wrong.c_str());
    return 1;
  }
  std::printf("%llu problems through", static_cast<unsigned long long>(seed - first));
  for (const Kernel* kernel : kernels) std::printf(" %s", kernel->name);
  std::printf("\n");
}
