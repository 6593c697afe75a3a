// SPDX-License-Identifier: Apache-2.0
//
// Products of matrices (mma, wgmma) and the loads and stores of their fragments.
//
// Sums are of float32 in the order of k. The hardware's order and rounding are its own; tests have to allow
// for both. wgmma is done where it is issued: a program that reads its sums too early is not found out.
#include <algorithm>

#include "machine.h"
#include "numbers.h"
#include "tensor_map.h"

namespace emulator {
namespace {

enum Element { kF16, kBf16, kS8, kE4m3, kE5m2 };

bool parse_element(std::string_view name, int64_t& element) {
  if (name == "f16") element = kF16;
  else if (name == "bf16") element = kBf16;
  else if (name == "s8") element = kS8;
  else if (name == "e4m3") element = kE4m3;
  else if (name == "e5m2") element = kE5m2;
  else return false;
  return true;
}
int bytes_of(int64_t element) { return element == kF16 || element == kBf16 ? 2 : 1; }

const float* fp8_table(int64_t element) {
  static const auto make = [](float (*decode)(uint8_t)) {
    std::array<float, 256> t;
    for (int c = 0; c < 256; ++c) t[c] = decode(static_cast<uint8_t>(c));
    return t;
  };
  static const std::array<float, 256> e4m3 = make(e4m3_to_float), e5m2 = make(e5m2_to_float);
  return element == kE4m3 ? e4m3.data() : e5m2.data();
}

// Small integers are exact as float32, but their sums are not: integer products have their own loop.
float decode(int64_t element, const uint8_t* at) {
  uint16_t half;
  switch (element) {
    case kF16: std::memcpy(&half, at, 2); return f16_to_float(half);
    case kBf16: std::memcpy(&half, at, 2); return bf16_to_float(half);
    case kS8: return static_cast<int8_t>(*at);
    default: return fp8_table(element)[*at];
  }
}

constexpr int kMostColumns = 256, kMostK = 32;

// d[rows, columns] += a[rows, k] b[k, columns]
struct Product {
  int columns, k;
  bool is_integer;
  float a[16][kMostK];
  alignas(64) float b[kMostK][kMostColumns];
  union {
    alignas(64) float d[16][kMostColumns];
    int32_t i[16][kMostColumns];
  };

  void run(int rows) {
    for (int r = 0; r < rows; ++r) {
      if (is_integer) {
        for (int j = 0; j < k; ++j) {
          const auto x = static_cast<int32_t>(a[r][j]);
          for (int c = 0; c < columns; ++c)
            i[r][c] = static_cast<int32_t>(static_cast<uint32_t>(i[r][c]) +
                                           static_cast<uint32_t>(x * static_cast<int32_t>(b[j][c])));
        }
      } else {
        for (int j = 0; j < k; ++j)
          for (int c = 0; c < columns; ++c) d[r][c] += a[r][j] * b[j][c];
      }
    }
  }
};
Product product;  // one thread emulates at a time

// Register r of a: row g, or g + 8 for odd ones; its elements from column 4 E (r / 2) + E q on.
void take_a(const Warp& w, const Operand* a, int registers, int64_t element) {
  const int bytes = bytes_of(element), each = 4 / bytes;
  for (int r = 0; r < registers; ++r) {
    const auto* slots = w.slots<uint32_t>(a[r]);
    for (int l = 0; l < kLanes; ++l) {
      const auto* at = reinterpret_cast<const uint8_t*>(&slots[l]);
      for (int e = 0; e < each; ++e)
        product.a[l / 4 + 8 * (r & 1)][r / 2 * 4 * each + l % 4 * each + e] = decode(element, at + e * bytes);
    }
  }
}
// Sums: registers 4 j .. 4 j + 3 are columns 8 j + 2 q, and one more, of rows g and g + 8.
template <class Each>
void for_sums(int rows, Each each) {
  const int of_tile = rows == 16 ? 4 : 2;
  for (int r = 0; r < product.columns / 8 * of_tile; ++r) {
    for (int l = 0; l < kLanes; ++l) {
      const int row = l / 4 + (r % of_tile >= 2 ? 8 : 0), column = r / of_tile * 8 + l % 4 * 2 + r % 2;
      each(r, l, row, column);
    }
  }
}

// {d}, {a}, {b}, {c}; with: k, the elements of a and of b, whether it is of 8 rows
void mma(Warp& w, const Instruction& i) {
  if (!w.gather_all()) return;
  const Operand *d = i.group(0), *a = i.group(1), *b = i.group(2), *c = i.group(3);
  const int rows = i.with[3] ? 8 : 16;
  const int64_t element_b = i.with[2];
  product.k = static_cast<int>(i.with[0]), product.columns = 8, product.is_integer = i.with[1] == kS8;
  take_a(w, a, i.counts[1], i.with[1]);
  const int bytes = bytes_of(element_b), each = 4 / bytes;
  for (int r = 0; r < i.counts[2]; ++r) {
    const auto* slots = w.slots<uint32_t>(b[r]);
    for (int l = 0; l < kLanes; ++l) {
      const auto* at = reinterpret_cast<const uint8_t*>(&slots[l]);
      for (int e = 0; e < each; ++e)
        product.b[r * 4 * each + l % 4 * each + e][l / 4] = decode(element_b, at + e * bytes);
    }
  }
  for_sums(rows, [&](int r, int l, int row, int column) {
    const uint32_t bits = w.slots<uint32_t>(c[r])[l];
    std::memcpy(&product.i[row][column], &bits, 4);
  });
  product.run(rows);
  for_sums(rows, [&](int r, int l, int row, int column) {
    uint32_t bits;
    std::memcpy(&bits, &product.i[row][column], 4);
    w.set<uint32_t>(d[r], l, bits);
  });
}

// Rows of k in shared memory, as a descriptor says (PTX ISA, "Matrix Descriptor Format").
struct Rows {
  uint64_t start, across, down;  // to the next 16 bytes of k, where nothing is swizzled; to the next 8 rows
  int swizzle;
  explicit Rows(uint64_t descriptor)
      : start((descriptor & 0x3fff) << 4),
        across((descriptor >> 16 & 0x3fff) << 4),
        down((descriptor >> 32 & 0x3fff) << 4) {
    constexpr int kModes[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_32B};
    swizzle = kModes[descriptor >> 62];
  }
  // Where 16 bytes of row r are.
  uint64_t piece(int r, int p) const {
    if (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE) return start + r / 8 * down + r % 8 * 16 + p * across;
    const uint64_t span = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                          : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                                                                 : 32;
    return swizzled(start + r / 8 * down + r % 8 * span + p * 16, swizzle);
  }
};

// {d}, {a} or its descriptor, that of b, whether to add; with: n, the elements of a and of b
void wgmma(Warp& w, const Instruction& i) {
  if (!w.gather_all()) return;
  const Operand *d = i.group(0), *a = i.group(1);
  const int64_t element_a = i.with[1], element_b = i.with[2];
  const int bytes = bytes_of(element_b), each = 16 / bytes;
  product.k = 2 * each, product.columns = static_cast<int>(i.with[0]), product.is_integer = element_a == kS8;
  if (i.counts[1] == 4) {
    take_a(w, a, 4, element_a);
  } else {
    const Rows rows(w.value<uint64_t>(a[0], 0));
    const int first = static_cast<int>(w.index % 4) * 16;
    for (int r = 0; r < 16; ++r) {
      for (int p = 0; p < 2; ++p) {
        const uint8_t* at = w.block.shared(w, rows.piece(first + r, p), 16);
        if (Races* races = w.races()) races->begin(w, Races::Work::products, at, 16, false);
        for (int e = 0; e < each; ++e) product.a[r][p * each + e] = decode(element_a, at + e * bytes);
      }
    }
  }
  const Rows rows(w.value<uint64_t>(i.group(2)[0], 0));
  for (int c = 0; c < product.columns; ++c) {
    for (int p = 0; p < 2; ++p) {
      const uint8_t* at = w.block.shared(w, rows.piece(c, p), 16);
      if (Races* races = w.races()) races->begin(w, Races::Work::products, at, 16, false);
      for (int e = 0; e < each; ++e) product.b[p * each + e][c] = decode(element_b, at + e * bytes);
    }
  }
  const bool adds = w.predicate(i.group(3)[0]) & 1;
  for_sums(16, [&](int r, int l, int row, int column) {
    const uint32_t bits = adds ? w.slots<uint32_t>(d[r])[l] : 0;
    std::memcpy(&product.i[row][column], &bits, 4);
  });
  product.run(16);
  for_sums(16, [&](int r, int l, int row, int column) {
    uint32_t bits;
    std::memcpy(&bits, &product.i[row][column], 4);
    w.set<uint32_t>(d[r], l, bits);
  });
}
void together(Warp& w, const Instruction&) { w.gather_all(); }
void commit_products(Warp& w, const Instruction&) {
  if (!w.gather_all()) return;
  if (Races* races = w.races()) races->commit(w, Races::Work::products);
}
void wait_for_products(Warp& w, const Instruction& i) {
  if (!w.gather_all()) return;
  if (Races* races = w.races())
    races->wait(w, Races::Work::products, static_cast<size_t>(i.operands[0].value));
}

// ---- Fragments of 8 x 8 matrices of 16 bits: lane 4 g + q has columns 2 q, 2 q + 1 of row g ----

template <bool kTransposed>
void load_matrices(Warp& w, const Instruction& i) {
  if (!w.gather_all()) return;
  const int count = i.counts[0];
  const Operand& from = i.operands[count];
  uint16_t all[4][8][8];
  for (int m = 0; m < count; ++m)
    for (int r = 0; r < 8; ++r) {
      const int l = m * 8 + r;
      const uint8_t* at = w.memory(Space::shared, w.address(from, l), 16, l, false);
      if (Races* races = w.races()) races->access(w, at, 16, false);
      std::memcpy(all[m][r], at, 16);
    }
  for (int m = 0; m < count; ++m) {
    w.set_all<uint32_t>(i.operands[m], [&](int l) {
      const int g = l / 4, q = l % 4;
      const uint32_t low = kTransposed ? all[m][2 * q][g] : all[m][g][2 * q];
      const uint32_t high = kTransposed ? all[m][2 * q + 1][g] : all[m][g][2 * q + 1];
      return high << 16 | low;
    });
  }
}
template <bool kTransposed>
void store_matrices(Warp& w, const Instruction& i) {
  if (!w.gather_all()) return;
  const int count = i.counts[1];
  for (int m = 0; m < count; ++m) {
    uint16_t all[8][8];
    const auto* slots = w.slots<uint32_t>(i.operands[1 + m]);
    for (int l = 0; l < kLanes; ++l) {
      const int g = l / 4, q = l % 4;
      (kTransposed ? all[2 * q][g] : all[g][2 * q]) = static_cast<uint16_t>(slots[l]);
      (kTransposed ? all[2 * q + 1][g] : all[g][2 * q + 1]) = static_cast<uint16_t>(slots[l] >> 16);
    }
    for (int r = 0; r < 8; ++r) {
      const int l = m * 8 + r;
      uint8_t* at = w.memory(Space::shared, w.address(i.operands[0], l), 16, l, true);
      if (Races* races = w.races()) races->access(w, at, 16, true);
      std::memcpy(at, all[r], 16);
    }
  }
  ++w.block.machine.num_events;
}

}  // namespace

void bind_matrix(const Mnemonic& name, Instruction& i) {
  const auto& p = name.parts;
  if (p[0] == "ldmatrix" || p[0] == "stmatrix") {
    if (!name.has("m8n8") || name.last() != "b16") return;
    const bool is_transposed = name.has("trans");
    if (p[0] == "ldmatrix") i.run = is_transposed ? load_matrices<true> : load_matrices<false>;
    else i.run = is_transposed ? store_matrices<true> : store_matrices<false>;
  } else if (p[0] == "mma" && p[1] == "sync") {
    // mma.sync.aligned.m16n8k16.row.col.D.A.B.C
    const auto shape = p[3];
    const bool has_elements =
        parse_element(name.from_end(2), i.with[1]) && parse_element(name.from_end(1), i.with[2]);
    if (!has_elements || p[4] != "row" || p[5] != "col" || name.has("satfinite")) return;
    if (name.last() != "f32" && name.last() != "s32") return;
    i.with[0] = std::atoi(std::string(shape.substr(shape.find('k') + 1)).c_str());
    i.with[3] = shape.substr(0, 3) == "m8n";
    i.run = mma;
  } else if (p[0] == "wgmma") {
    if (p[1] != "mma_async") {
      i.run = p[1] == "commit_group" ? commit_products : p[1] == "wait_group" ? wait_for_products : together;
      return;
    }
    // wgmma.mma_async.sync.aligned.m64n64k16.D.A.B; then whether to add, signs of a and b, transpositions
    const auto shape = p[4];
    if (!parse_element(name.from_end(1), i.with[1]) || !parse_element(name.from_end(0), i.with[2])) return;
    i.with[0] = std::atoi(std::string(shape.substr(4, shape.find('k') - 4)).c_str());
    for (size_t g = 4; g < i.counts.size(); ++g)
      if (i.group(static_cast<int>(g))[0].value != (g < 6 ? 1 : 0)) return;
    i.run = wgmma;
  }
}

}  // namespace emulator
