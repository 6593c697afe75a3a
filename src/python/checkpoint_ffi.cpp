// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints for Python: one that is opened stays so for as long as a function or a tensor of it lives.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/error.h"
#include "checkpoint/import.h"

namespace ffi = tvm::ffi;
namespace checkpoint = quantfuse::checkpoint;

namespace {

struct Opened {
  explicit Opened(const std::string& path, const checkpoint::StatedFields& stated)
      : files(path), import(checkpoint::import_checkpoint(files, stated)) {}
  checkpoint::Checkpoint files;
  checkpoint::Import import;
};

// A CPU tensor over memory that `owner` keeps.
template <class Owner>
ffi::Tensor tensor_over(Owner owner, const void* data, DLDataType dtype, std::vector<int64_t> shape) {
  struct Held {
    Owner owner;
    std::vector<int64_t> shape;
    DLManagedTensor managed;
  };
  auto* held = new Held{std::move(owner), std::move(shape), {}};
  DLTensor& t = held->managed.dl_tensor;
  t.data = const_cast<void*>(data);
  t.device = {kDLCPU, 0};
  t.ndim = static_cast<int32_t>(held->shape.size());
  t.dtype = dtype;
  t.shape = held->shape.data();
  held->managed.manager_ctx = held;
  held->managed.deleter = [](DLManagedTensor* self) { delete static_cast<Held*>(self->manager_ctx); };
  return ffi::Tensor::FromDLPack(&held->managed);
}

template <class T>
ffi::Any tensor_of(std::vector<T> values, DLDataType dtype, std::vector<int64_t> shape) {
  if (values.empty()) return nullptr;
  auto owner = std::make_shared<std::vector<T>>(std::move(values));
  const void* data = owner->data();
  return tensor_over(std::move(owner), data, dtype, std::move(shape));
}

std::string describe(const Opened& opened) {
  checkpoint::Json layers = checkpoint::Json::array(), plain = checkpoint::Json::array();
  for (const auto& layer : opened.import.layers) {
    const checkpoint::LayerInfo& info = layer->info();
    layers.push_back({{"name", info.name},
                      {"shape", info.shape},
                      {"format", info.format},
                      {"bytes", info.bytes()},
                      {"rounding", checkpoint::type_name(info.rounding)}});
  }
  for (const checkpoint::Tensor* tensor : opened.import.plain) {
    plain.push_back(
        {{"name", tensor->name}, {"shape", tensor->shape}, {"type", checkpoint::type_name(tensor->type)}});
  }
  return checkpoint::Json{{"format", opened.import.format},
                          {"architecture", opened.files.architecture()},
                          {"is_gguf", opened.files.container() == checkpoint::Container::gguf},
                          {"layers", layers},
                          {"plain", plain}}
      .dump();
}

// What QuantizedWeight takes: format, n, k, block rows, block columns, codes (as bytes), scales, zeros,
// offsets, g_idx. Empty where the format does not map to it exactly.
ffi::Array<ffi::Any> canonical(const checkpoint::Layer& layer) {
  layer.info().prefetch_pages();
  auto weight = layer.canonical();
  layer.info().release_pages();
  if (!weight) return {};
  constexpr DLDataType u8 = {kDLUInt, 8, 1}, i8 = {kDLInt, 8, 1}, i32 = {kDLInt, 32, 1},
                       f32 = {kDLFloat, 32, 1};
  const int64_t rows = weight->n ? (weight->n + weight->block_rows() - 1) / weight->block_rows() : 0;
  const std::vector<int64_t> grid = {rows, weight->num_groups};
  const bool is_e8m0 = !weight->scale_e8m0.empty();
  ffi::Any scale = is_e8m0 ? tensor_of(std::move(weight->scale_e8m0), u8, grid)
                           : tensor_of(std::move(weight->scale), f32, grid);
  return {static_cast<int64_t>(weight->format),
          weight->n,
          weight->k,
          weight->block.rows,
          weight->block.cols,
          tensor_of(std::move(weight->codes), u8, {weight->n, weight->row_bytes()}),
          scale,
          tensor_of(std::move(weight->zero), i8, grid),
          tensor_of(std::move(weight->offset), f32, grid),
          tensor_of(std::move(weight->g_idx), i32, {weight->k})};
}

void dequantize(const checkpoint::Layer& layer, const ffi::Tensor& out) {
  layer.info().prefetch_pages();
  layer.dequantize({static_cast<float*>(out.data_ptr()), static_cast<size_t>(out.numel())});
  layer.info().release_pages();
}

template <class Call>
auto checked(Call call) {
  try {
    return call();
  } catch (const checkpoint::CheckpointError& error) {
    throw ffi::Error("ValueError", error.what(), "");
  }
}

// A description in JSON, and functions of the number of a layer or of a plain tensor.
ffi::Array<ffi::Any> open(const ffi::String& path, const ffi::Array<ffi::String>& stated) {
  checkpoint::StatedFields fields;
  for (size_t i = 0; i + 1 < stated.size(); i += 2) fields.emplace_back(stated[i], stated[i + 1]);
  auto opened = checked([&] { return std::make_shared<Opened>(std::string(path), fields); });
  const auto layer = [opened](int64_t i) -> const checkpoint::Layer& { return *opened->import.layers.at(i); };
  return {ffi::String(describe(*opened)),
          ffi::Function::FromTyped([=](int64_t i) { return checked([&] { return canonical(layer(i)); }); }),
          ffi::Function::FromTyped(
              [=](int64_t i, ffi::Tensor out) { checked([&] { dequantize(layer(i), out); }); }),
          ffi::Function::FromTyped([opened](int64_t i) {
            const checkpoint::Tensor& tensor = *opened->import.plain.at(i);
            return tensor_over(opened, tensor.bytes.data(), {kDLUInt, 8, 1},
                               {static_cast<int64_t>(tensor.bytes.size())});
          })};
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(checkpoint_open, open)
