// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/dequantize.h"

#include <algorithm>

#include "checkpoint/safetensors_writer.h"

namespace quantfuse::checkpoint {
namespace {

// One tensor of the output: a layer to dequantize or a tensor to copy.
struct Item {
  const Layer* layer;
  const Tensor* plain;

  TensorHeader header(Type type) const {
    if (layer) return {layer->info().name, type, layer->info().shape};
    return {plain->name, plain->type, plain->shape};
  }
};

void write_layer(NewFile& file, const Layer& layer, Type type) {
  std::vector<float> numbers(static_cast<size_t>(layer.info().numel()));
  layer.dequantize(numbers);
  auto* bytes = reinterpret_cast<uint8_t*>(numbers.data());
  if (type == Type::f32) return file.write({bytes, numbers.size() * sizeof(float)});
  // In place: number i of 2 bytes never reaches beyond number i of 4.
  for (size_t i = 0; i < numbers.size(); ++i) {
    bf16 rounded;
    from_float(numbers[i], rounded);
    std::memcpy(bytes + i * sizeof(rounded), &rounded, sizeof(rounded));
  }
  file.write({bytes, numbers.size() * sizeof(bf16)});
}

}  // namespace

void write_dequantized(const Import& import, NewFile& file, Type type,
                       const std::function<void(const std::string& name)>& on_tensor) {
  std::vector<Item> items;
  for (const auto& layer : import.layers) items.push_back({layer.get(), nullptr});
  for (const Tensor* tensor : import.plain) items.push_back({nullptr, tensor});
  std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) {
    return is_wider(a.header(type).type, b.header(type).type);
  });
  std::vector<TensorHeader> headers;
  for (const Item& item : items) headers.push_back(item.header(type));

  write_safetensors_header(file, headers);
  for (const Item& item : items) {
    on_tensor(item.layer ? item.layer->info().name : item.plain->name);
    if (item.layer) {
      item.layer->info().prefetch_pages();
      write_layer(file, *item.layer, type);
      item.layer->info().release_pages();
    } else {
      prefetch_pages(item.plain->bytes);
      file.write(item.plain->bytes);
      release_pages(item.plain->bytes);
    }
  }
  file.finish();
}

}  // namespace quantfuse::checkpoint
