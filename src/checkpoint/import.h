// SPDX-License-Identifier: Apache-2.0
//
// From the tensors of a checkpoint to its quantized layers. The format is what quantization_config says, and
// every tensor is held against it: one that is missing, left over or of another shape is an error by name.
//
// A format is one file in importers/ and one line in importers.list.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layer.h"
#include "checkpoint/settings.h"

namespace quantfuse::checkpoint {

struct Import {
  std::string format;                          // "gptq v1"; "" where nothing is quantized
  std::vector<std::unique_ptr<Layer>> layers;  // in the order of the files
  std::vector<const Tensor*> plain;            // all other tensors, in the order of the files
};

// The layers point into the checkpoint. `stated` goes over quantization_config.
Import import_checkpoint(const Checkpoint& checkpoint, const StatedFields& stated = {});

// What an importer works with.
class Plan {
 public:
  Plan(const Checkpoint& checkpoint, Settings settings)
      : checkpoint(checkpoint), settings(std::move(settings)) {}

  // Fails where it is missing, naming it and, where given, the tensor that cannot do without it.
  const Tensor& need(const std::string& name, const std::string& for_whom = "") const;
  const Tensor* find(const std::string& name) const { return checkpoint.find(name); }
  // The names that end in `suffix`, without it, in the order of the files.
  std::vector<std::string> modules_with(std::string_view suffix) const;
  void add(std::unique_ptr<Layer> layer) { layers.push_back(std::move(layer)); }

  const Checkpoint& checkpoint;
  Settings settings;   // quantization_config
  std::string format;  // set by the importer
  std::vector<std::unique_ptr<Layer>> layers;
};

struct Importer {
  const char* method;              // quant_method in quantization_config
  std::vector<const char*> marks;  // ends of names that only this format has
  std::vector<const char*> parts;  // further ends of names that are parts of a layer under this format
  void (*plan)(Plan&);
};

// In the order of importers.list.
std::vector<const Importer*> importers();

// Whether a list of modules that were left unquantized has `module`: itself, one above it or its last names.
bool is_listed(const std::vector<std::string>& modules, const std::string& module);

}  // namespace quantfuse::checkpoint
