// The operators' CUDA kernels, as schemas.py declares them; bindings.cpp gives them to the
// dispatcher.
#pragma once

#include <tuple>
#include <vector>

#include "kernels.h"

namespace fp8lt {

using Tensors4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Tensors5 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Tensors4 quantize_tensorwise_op(const at::Tensor& x, at::ScalarType dtype, bool row_major,
                                 bool transposed, std::optional<at::ScalarType> sums_dtype,
                                 bool power_of_two);
Tensors4 quantize_delayed_op(const at::Tensor& x, at::ScalarType dtype, bool row_major,
                              bool transposed, at::Tensor state, int64_t margin, bool most_recent,
                              bool record, std::optional<at::ScalarType> sums_dtype,
                              bool power_of_two);
std::vector<at::Tensor> quantize_shards_op(at::TensorList shards, at::ScalarType dtype,
                                           const at::Tensor& amaxes, bool power_of_two);
Tensors5 quantize_rowwise_op(const at::Tensor& x, at::ScalarType dtype, bool row_major,
                                   bool transposed, bool power_of_two, bool folded,
                                   const std::optional<at::Tensor>& fold_cols,
                                   const std::optional<at::Tensor>& fold_rows,
                                   std::optional<at::ScalarType> sums_dtype);
Tensors5 quantize_blockwise_op(const at::Tensor& x, at::ScalarType dtype, bool row_major,
                                     bool transposed, bool power_of_two, bool square,
                                     std::optional<at::ScalarType> sums_dtype);
at::Tensor transposed_op(const at::Tensor& data);
at::Tensor gemm_nt_op(const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_scale_inv,
                      const at::Tensor& b_scale_inv, int64_t m, int64_t n,
                      const std::optional<at::Tensor>& bias, at::ScalarType out_dtype,
                      bool fast_accum, int64_t a_scaling, int64_t b_scaling);
void gemm_nt_add_op(const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_scale_inv,
                    const at::Tensor& b_scale_inv, at::Tensor d, bool fast_accum,
                    int64_t a_scaling, int64_t b_scaling);

}  // namespace fp8lt
