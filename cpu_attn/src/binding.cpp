// tvm-ffi boundary: turns tensors into pointers and strides, C++ exceptions into ValueError and
// RuntimeError. Tensors are borrowed; the Python side keeps them alive for as long as a handle or
// an unfinished job refers to them.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/memory.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu_attn/dispatch.h"
#include "cpu_attn/executor.h"
#include "cpu_attn/team.h"

namespace cpu_attn {
namespace {

namespace ffi = tvm::ffi;
using ffi::TensorView;

// Raised by every incompatible change of the functions below, not by additions; library.py asks
// for it.
constexpr int64_t kAbiVersion = 1;

std::atomic<const Kernel*> selected{nullptr};

#define CPU_ATTN_HANDLE(Name, Key, Value)                                           \
  struct Name##Object : ffi::Object {                                               \
    Value value;                                                                    \
    TVM_FFI_DECLARE_OBJECT_INFO_FINAL(Key, Name##Object, ffi::Object);              \
  };                                                                                \
  struct Name : ffi::ObjectRef {                                                    \
    TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(Name, ffi::ObjectRef, Name##Object); \
    Value& operator*() const { return const_cast<Name##Object*>(get())->value; }    \
  }

CPU_ATTN_HANDLE(KvRef, "cpu_attn.Kv", std::shared_ptr<Kv>);
CPU_ATTN_HANDLE(TableRef, "cpu_attn.Table", TableView);
CPU_ATTN_HANDLE(CopyRef, "cpu_attn.CopyList", std::shared_ptr<std::vector<CopyPair>>);
using ExecutorPtr = std::unique_ptr<Executor, DeleteInOwner>;
CPU_ATTN_HANDLE(ExecutorRef, "cpu_attn.Executor", ExecutorPtr);
CPU_ATTN_HANDLE(JobRef, "cpu_attn.Job", std::shared_ptr<Job>);

template <class Ref, class Object, class Value>
Ref make_handle(Value value) {
  auto object = ffi::make_object<Object>();
  object->value = std::move(value);
  return Ref(std::move(object));
}

// std exceptions become typed errors; the exported wrapper hands those over without unwinding.
template <class F>
auto guarded(F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const ffi::Error&) {
    throw;
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  } catch (const std::exception& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
  TVM_FFI_UNREACHABLE();
}

Dtype dtype_of(const TensorView& tensor) {
  const DLDataType dtype = tensor.dtype();
  if (dtype.code == kDLBfloat && dtype.bits == 16) return Dtype::kBFloat16;
  if (dtype.code == kDLFloat && dtype.bits == 16) return Dtype::kFloat16;
  if (dtype.code == kDLFloat && dtype.bits == 32) return Dtype::kFloat32;
  throw std::invalid_argument("expected a bfloat16, float16 or float32 tensor");
}

template <class T = char>
T* data_of(const TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

int64_t byte_stride(const TensorView& tensor, int dim) {
  return tensor.stride(dim) * tensor.dtype().bits / 8;
}

KvRef kv_new(int64_t page_size, int64_t kv_heads, int64_t head_dim) {
  auto kv = std::make_shared<Kv>();
  kv->page_size = static_cast<int32_t>(page_size);
  kv->kv_heads = static_cast<int32_t>(kv_heads);
  kv->head_dim = static_cast<int32_t>(head_dim);
  kv->value_dim = kv->head_dim;
  return make_handle<KvRef, KvRefObject>(std::move(kv));
}

// One row of `width` elements a token, the first `value_dim` of them the value; kv_add takes the
// rows as both k and v, with one head.
KvRef kv_new_latent(int64_t page_size, int64_t width, int64_t value_dim) {
  KvRef ref = kv_new(page_size, 1, width);
  (*ref)->value_dim = static_cast<int32_t>(value_dim);
  (*ref)->latent = true;
  return ref;
}

// k, v: [pages, page_size, kv_heads, head_dim]
void kv_add(KvRef ref, TensorView k, TensorView v) {
  guarded([&] {
    Kv& kv = **ref;
    kv.dtype = dtype_of(k);
    kv.regions.push_back({data_of(k), data_of(v), k.size(0), byte_stride(k, 0), byte_stride(k, 1),
                          byte_stride(k, 2), byte_stride(v, 0), byte_stride(v, 1),
                          byte_stride(v, 2)});
  });
}

TableRef table_new(TensorView region, TensorView page, TensorView indptr, TensorView lengths) {
  return make_handle<TableRef, TableRefObject>(TableView{data_of<int32_t>(region),
                                                         data_of<int32_t>(page),
                                                         data_of<int32_t>(indptr),
                                                         data_of<int32_t>(lengths),
                                                         region.size(0),
                                                         lengths.size(0),
                                                         {}});
}

// The same table with lists of blocks; ids: [batch, lists, most].
TableRef table_with_blocks(TableRef table, TensorView ids, int64_t block_tokens) {
  TableView view = *table;
  view.blocks = {data_of<int32_t>(ids), ids.size(1), ids.size(2), block_tokens};
  return make_handle<TableRef, TableRefObject>(view);
}

DecodeCall decode_call(const TensorView& q, const KvRef& kv, const TableRef& table, double scale,
                       const TensorView& out, const TensorView& lse) {
  DecodeCall call{};
  call.kv = *kv;
  call.table = *table;
  call.kernel = selected.load();
  call.q = data_of(q);
  call.q_batch_stride = byte_stride(q, 0);
  call.q_head_stride = byte_stride(q, 1);
  call.out = data_of<float>(out);
  call.out_batch_stride = out.stride(0);
  call.out_head_stride = out.stride(1);
  call.lse = data_of<float>(lse);
  call.lse_batch_stride = lse.stride(0);
  call.lse_head_stride = lse.stride(1);
  call.q_heads = static_cast<int32_t>(q.size(1));
  call.q_dtype = dtype_of(q);
  call.scale = static_cast<float>(scale);
  return call;
}

void decode(TensorView q, KvRef kv, TableRef table, double scale, TensorView out, TensorView lse,
            int64_t threads) {
  guarded([&] {
    const DecodeCall call = decode_call(q, kv, table, scale, out, lse);
    run_direct(static_cast<int>(threads), [&](Team& team) { team.decode(call); });
  });
}

ExecutorRef executor_new(int64_t threads, ffi::Shape cores, double spin_s) {
  return guarded([&] {
    return make_handle<ExecutorRef, ExecutorRefObject>(ExecutorPtr(new Executor(
        static_cast<int>(threads), std::vector<int>(cores.begin(), cores.end()), spin_s)));
  });
}

void executor_close(ExecutorRef executor) {
  guarded([&] { (*executor)->close(); });
}

JobRef submit(const ExecutorRef& executor, std::function<void(Team&)> work, Signal signal = {}) {
  return guarded([&] {
    return make_handle<JobRef, JobRefObject>((*executor)->submit(std::move(work), signal));
  });
}

// flag: [1] int32 to raise to `value` at the end, or [0] for none.
JobRef submit_decode(ExecutorRef executor, TensorView q, KvRef kv, TableRef table, double scale,
                     TensorView out, TensorView lse, TensorView flag, int64_t value) {
  return guarded([&] {
    const DecodeCall call = decode_call(q, kv, table, scale, out, lse);
    Signal signal;
    if (flag.size(0) > 0) signal = {data_of<int32_t>(flag), static_cast<int32_t>(value)};
    return submit(executor, [call](Team& team) { team.decode(call); }, signal);
  });
}

JobRef submit_first_touch(ExecutorRef executor, TensorView buffer) {
  char* data = data_of(buffer);
  const int64_t bytes = buffer.size(0);
  return submit(executor, [=](Team& team) { team.first_touch(data, bytes); });
}

JobRef submit_read(ExecutorRef executor, TensorView buffer) {
  const char* data = data_of(buffer);
  const int64_t bytes = buffer.size(0);
  const Kernel* kernel = selected.load();
  return submit(executor, [=](Team& team) { team.read(kernel, data, bytes); });
}

JobRef submit_read_pieces(ExecutorRef executor, TensorView buffer, TensorView starts,
                          int64_t piece_bytes) {
  const char* data = data_of(buffer);
  const int64_t* first = data_of<int64_t>(starts);
  const int64_t count = starts.size(0);
  const Kernel* kernel = selected.load();
  return submit(executor,
                [=](Team& team) { team.read_pieces(kernel, data, first, count, piece_bytes); });
}

JobRef submit_multiply(ExecutorRef executor, int64_t rounds) {
  const Kernel* kernel = selected.load();
  return submit(executor, [=](Team& team) { team.multiply(kernel, rounds); });
}

// FLOPs of one round of one thread.
double multiply_flops() { return selected.load()->multiply(1); }

CopyRef copy_new() {
  return make_handle<CopyRef, CopyRefObject>(std::make_shared<std::vector<CopyPair>>());
}

// Both of the same shape and dtype, last dimension contiguous, at least one dimension.
void copy_add(CopyRef list, TensorView dst, TensorView src) {
  guarded([&] {
    CopyPair pair{data_of(dst), data_of(src), dst.dtype().bits / 8, 0, {}, {}, {}};
    // Dimensions that both sides lay out without a gap join the run that is copied at once.
    int dim = dst.ndim() - 1;
    for (; dim >= 0; --dim) {
      if (dst.size(dim) != 1 &&
          (byte_stride(dst, dim) != pair.row_bytes || byte_stride(src, dim) != pair.row_bytes))
        break;
      pair.row_bytes *= dst.size(dim);
    }
    pair.outer_dims = dim + 1;
    if (pair.outer_dims > kMaxCopyDims)
      throw std::invalid_argument("at most 6 strided dimensions can be copied");
    for (int i = 0; i < pair.outer_dims; ++i) {
      pair.shape[i] = dst.size(i);
      pair.dst_stride[i] = byte_stride(dst, i);
      pair.src_stride[i] = byte_stride(src, i);
    }
    if (pair.row_bytes > 0) (*list)->push_back(pair);
  });
}

JobRef submit_copy(ExecutorRef executor, CopyRef list) {
  std::shared_ptr<const std::vector<CopyPair>> pairs = *list;
  return submit(executor, [pairs](Team& team) { team.copy(*pairs); });
}

bool job_wait(JobRef job, double seconds) {
  return guarded([&] { return (*job)->wait(seconds); });
}

bool job_done(JobRef job) {
  return guarded([&] { return (*job)->done(); });
}

// Run time of a finished job; raises what its work raised.
double job_result(JobRef ref) {
  const Job& job = **ref;
  if (job.outcome() == Job::Outcome::kInvalid) TVM_FFI_THROW(ValueError) << job.message();
  if (job.outcome() == Job::Outcome::kFailed) TVM_FFI_THROW(RuntimeError) << job.message();
  return job.seconds();
}

double job_seconds(JobRef job) { return (*job)->seconds(); }

// "" past the last.
ffi::String supported_isa(int64_t i) {
  const Kernel* kernel = supported_kernel(static_cast<int>(i));
  return kernel == nullptr ? "" : kernel->name;
}

bool select_isa(ffi::String name) {
  const Kernel* kernel = find_kernel(name.c_str());
  if (kernel != nullptr) selected.store(kernel);
  return kernel != nullptr;
}

int64_t abi_version() { return kAbiVersion; }

}  // namespace
}  // namespace cpu_attn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(abi_version, cpu_attn::abi_version)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(supported_isa, cpu_attn::supported_isa)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_isa, cpu_attn::select_isa)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kv_new, cpu_attn::kv_new)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kv_new_latent, cpu_attn::kv_new_latent)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kv_add, cpu_attn::kv_add)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(table_new, cpu_attn::table_new)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(table_with_blocks, cpu_attn::table_with_blocks)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, cpu_attn::decode)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(executor_new, cpu_attn::executor_new)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(executor_close, cpu_attn::executor_close)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(submit_decode, cpu_attn::submit_decode)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(submit_first_touch, cpu_attn::submit_first_touch)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(submit_read, cpu_attn::submit_read)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(submit_read_pieces, cpu_attn::submit_read_pieces)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(submit_multiply, cpu_attn::submit_multiply)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(multiply_flops, cpu_attn::multiply_flops)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_new, cpu_attn::copy_new)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_add, cpu_attn::copy_add)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(submit_copy, cpu_attn::submit_copy)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(job_wait, cpu_attn::job_wait)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(job_done, cpu_attn::job_done)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(job_result, cpu_attn::job_result)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(job_seconds, cpu_attn::job_seconds)
