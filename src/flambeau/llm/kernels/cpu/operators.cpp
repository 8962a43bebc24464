// The CPU kernels as operators of torch: what they take and give is in kernels/native.py, with their plain twins.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "linear.h"
#include "paged_attention.h"

namespace {

using at::Tensor;

template <typename scalar>
scalar* data_of(const Tensor& tensor) {
  return static_cast<scalar*>(tensor.data_ptr());
}

template <typename scalar>
void attend(flambeau::PagedStep<scalar> step, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys,
            const Tensor& values, const Tensor& out) {
  step.q = data_of<scalar>(q), step.k = data_of<scalar>(k), step.v = data_of<scalar>(v);
  step.keys = data_of<scalar>(keys), step.values = data_of<scalar>(values), step.out = data_of<scalar>(out);
  const int num_threads = at::get_num_threads();
  switch (q.size(2)) {
    case 16: return flambeau::attend_paged<1>(step, num_threads);
    case 32: return flambeau::attend_paged<2>(step, num_threads);
    case 64: return flambeau::attend_paged<4>(step, num_threads);
    case 80: return flambeau::attend_paged<5>(step, num_threads);
    case 96: return flambeau::attend_paged<6>(step, num_threads);
    case 128: return flambeau::attend_paged<8>(step, num_threads);
    case 256: return flambeau::attend_paged<16>(step, num_threads);
    default: TORCH_CHECK(false, "paged_attention has no kernel for heads of ", q.size(2));
  }
}

template <typename scalar>
flambeau::PagedStep<scalar> plan(const Tensor& q, const Tensor& k, const Tensor& keys, const Tensor& slots,
                                 const Tensor& starts, const Tensor& lengths, const Tensor& tables, double scale,
                                 int64_t window) {
  flambeau::PagedStep<scalar> step{};
  step.slots = data_of<int64_t>(slots), step.starts = data_of<int64_t>(starts);
  step.lengths = data_of<int64_t>(lengths), step.tables = data_of<int64_t>(tables);
  step.num_tokens = q.size(0), step.num_sequences = lengths.size(0), step.heads = q.size(1), step.kv_heads = k.size(1);
  step.block_size = keys.size(1), step.table_width = tables.size(1), step.window = window;
  step.scale = static_cast<float>(scale);
  return step;
}

Tensor paged_attention(const Tensor& q_THD, const Tensor& k_TGD, const Tensor& v_TGD, const Tensor& keys,
                       const Tensor& values, const Tensor& slots_T, const Tensor& starts, const Tensor& lengths_S,
                       const Tensor& tables_SB, double scale, int64_t window) {
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous(), "the cache must be contiguous");
  for (const Tensor* tensor : {&q_THD, &k_TGD, &v_TGD, &values})
    TORCH_CHECK(tensor->scalar_type() == keys.scalar_type(), "queries, keys, values and cache must have one type");
  for (const Tensor* tensor : {&slots_T, &starts, &lengths_S, &tables_SB})
    TORCH_CHECK(tensor->scalar_type() == at::kLong, "slots, starts, lengths and block tables must be int64");
  const Tensor q = q_THD.contiguous(), k = k_TGD.contiguous(), v = v_TGD.contiguous();
  const Tensor slots = slots_T.contiguous(), starts_ = starts.contiguous(), lengths = lengths_S.contiguous();
  const Tensor tables = tables_SB.contiguous();
  Tensor out = at::empty_like(q);
  if (keys.scalar_type() == at::kFloat) {
    attend(plan<float>(q, k, keys, slots, starts_, lengths, tables, scale, window), q, k, v, keys, values, out);
  } else {
    TORCH_CHECK(keys.scalar_type() == at::kBFloat16, "the cache must be float32 or bfloat16");
    attend(plan<uint16_t>(q, k, keys, slots, starts_, lengths, tables, scale, window), q, k, v, keys, values, out);
  }
  return out;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && weight.is_contiguous(), "linear needs float32 rows and whole weights");
  const Tensor rows = x.contiguous();
  const int64_t size = weight.size(1), width = weight.size(0), num_rows = rows.numel() / size;
  auto shape = x.sizes().vec();
  TORCH_CHECK(shape.back() == size, "rows of ", shape.back(), " do not fit weights of ", size);
  shape.back() = width;
  Tensor out = at::empty(shape, x.options());
  const float* offset = bias ? data_of<float>(*bias) : nullptr;
  const float* from = data_of<float>(rows);
  const int num_threads = at::get_num_threads();
  if (weight.scalar_type() == at::kFloat) {
    flambeau::multiply(from, data_of<float>(weight), offset, data_of<float>(out), num_rows, size, width, num_threads);
  } else {
    TORCH_CHECK(weight.scalar_type() == at::kBFloat16, "weights must be float32 or bfloat16");
    flambeau::multiply(from, data_of<uint16_t>(weight), offset, data_of<float>(out), num_rows, size, width,
                       num_threads);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(flambeau, library) {
  library.def(
      "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor starts, "
      "Tensor lengths, Tensor tables, float scale, int window) -> Tensor");
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(flambeau, CPU, library) {
  library.impl("paged_attention", paged_attention);
  library.impl("linear", linear);
}
