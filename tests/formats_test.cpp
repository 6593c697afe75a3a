// SPDX-License-Identifier: Apache-2.0
//
// Every code of every format, and the rounding of every 16-bit input, of every boundary between two codes and
// of random floats. What is expected is computed here from the definition of a format, by search among all
// its values.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "formats/codes.h"

namespace quantfuse {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// A float format by its definition: `finite` is the number of non-negative finite codes, which are the
// smallest ones.
struct Definition {
  std::string name;
  int exponent_bits, mantissa_bits, bias;
  uint32_t finite;
  bool saturates;    // beyond the largest: the largest, otherwise infinity by IEEE rounding
  int64_t nan_code;  // of positive NaN; -1: NaN becomes 0
  uint32_t (*encode)(float);
  float (*decode)(uint32_t);

  uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }

  double value(uint32_t magnitude) const {
    const int exponent = static_cast<int>(magnitude >> mantissa_bits);
    const int mantissa = static_cast<int>(magnitude & ((1u << mantissa_bits) - 1));
    if (exponent == 0) return std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
};

std::vector<Definition> definitions() {
  return {
      {"e4m3", 4, 3, 7, 0x7f, true, 0x7f, [](float x) -> uint32_t { return E4m3::encode(x); },
       [](uint32_t c) { return E4m3::decode(static_cast<uint8_t>(c)); }},
      {"e5m2", 5, 2, 15, 0x7c, true, 0x7f, [](float x) -> uint32_t { return E5m2::encode(x); },
       [](uint32_t c) { return E5m2::decode(static_cast<uint8_t>(c)); }},
      {"e2m1", 2, 1, 1, 8, true, -1, [](float x) -> uint32_t { return E2m1::encode(x); },
       [](uint32_t c) { return E2m1::decode(static_cast<uint8_t>(c)); }},
      {"f16", 5, 10, 15, 0x7c00, false, 0x7e00,
       [](float x) -> uint32_t {
         f16 h;
         from_float(x, h);
         return h.bits;
       },
       [](uint32_t c) { return to_float(f16{static_cast<uint16_t>(c)}); }},
      {"bf16", 8, 7, 127, 0x7f80, false, 0x7fc0,
       [](float x) -> uint32_t {
         bf16 h;
         from_float(x, h);
         return h.bits;
       },
       [](uint32_t c) { return to_float(bf16{static_cast<uint16_t>(c)}); }},
  };
}

// The nearest of all values, of two equally near the one with an even code.
uint32_t expected_code(const Definition& d, const std::vector<double>& values, float x) {
  const uint32_t sign = std::signbit(x) ? d.sign_bit() : 0;
  const double a = std::fabs(static_cast<double>(x));
  const auto above = std::lower_bound(values.begin(), values.end(), a);
  if (above == values.begin()) return sign;
  if (above == values.end()) {
    if (d.saturates) return sign | (d.finite - 1);
    // The next value there would be, had the format one more, is where infinity begins to be nearer.
    const bool is_infinite = a >= (values.back() + d.value(d.finite)) / 2;
    return sign | (is_infinite ? d.finite : d.finite - 1);
  }
  const auto high = static_cast<uint32_t>(above - values.begin()), low = high - 1;
  const double to_low = a - values[low], to_high = values[high] - a;
  const bool takes_low = to_low < to_high || (to_low == to_high && low % 2 == 0);
  return sign | (takes_low ? low : high);
}

class FloatFormat : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    d_ = definitions()[GetParam()];
    for (uint32_t code = 0; code < d_.finite; ++code) values_.push_back(d_.value(code));
    ASSERT_TRUE(std::is_sorted(values_.begin(), values_.end()));
  }
  void expect_rounding(float x) {
    if (HasFatalFailure()) return;
    ASSERT_EQ(d_.encode(x), expected_code(d_, values_, x))
        << d_.name << " of " << x << " = bits " << float_bits(x);
  }
  Definition d_;
  std::vector<double> values_;
};

TEST_P(FloatFormat, DecodesEveryFiniteCode) {
  for (uint32_t code = 0; code < d_.finite; ++code) {
    ASSERT_EQ(d_.decode(code), values_[code]) << d_.name << " code " << code;
    const float negative = d_.decode(code | d_.sign_bit());
    ASSERT_EQ(negative, -values_[code]);
    ASSERT_TRUE(std::signbit(negative));
  }
}

TEST_P(FloatFormat, DecodesInfinityAndNan) {
  const uint32_t codes = d_.sign_bit();
  for (uint32_t code = d_.finite; code < codes; ++code) {
    const bool has_infinity = d_.name != "e4m3";
    const float x = d_.decode(code), negative = d_.decode(code | d_.sign_bit());
    if (has_infinity && code == d_.finite) {
      EXPECT_EQ(x, kInf);
      EXPECT_EQ(negative, -kInf);
    } else {
      EXPECT_TRUE(std::isnan(x)) << d_.name << " code " << code;
      EXPECT_TRUE(std::isnan(negative)) << d_.name << " code " << code;
    }
  }
}

TEST_P(FloatFormat, EncodesItsOwnValues) {
  for (uint32_t code = 0; code < d_.finite; ++code) {
    ASSERT_EQ(d_.encode(d_.decode(code)), code);
    ASSERT_EQ(d_.encode(d_.decode(code | d_.sign_bit())), code | d_.sign_bit());
  }
}

TEST_P(FloatFormat, RoundsAtEveryBoundary) {
  for (uint32_t code = 0; code < d_.finite; ++code) {
    const double next = d_.value(code + 1);  // for the last one: what overflow is judged by
    const auto middle = static_cast<float>((values_[code] + next) / 2);
    if (!std::isfinite(middle)) continue;  // the last of bf16, beyond float32
    ASSERT_EQ(static_cast<double>(middle), (values_[code] + next) / 2) << "the boundary is not a float";
    for (const float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, kInf)}) {
      expect_rounding(x);
      expect_rounding(-x);
    }
  }
}

TEST_P(FloatFormat, RoundsEvery16BitInput) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float from_f16 = to_float(f16{static_cast<uint16_t>(bits)});
    const float from_bf16 = to_float(bf16{static_cast<uint16_t>(bits)});
    for (const float x : {from_f16, from_bf16}) {
      if (!std::isnan(x)) expect_rounding(x);
    }
  }
}

TEST_P(FloatFormat, RoundsRandomFloats) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> exponent(-30.0f, 20.0f);
  for (int i = 0; i < 200000; ++i) {
    const float any = float_from_bits(random());
    if (!std::isnan(any)) expect_rounding(any);
    expect_rounding(std::exp2(exponent(random)) * (i % 2 ? 1.0f : -1.0f));
  }
}

TEST_P(FloatFormat, EncodesNanAndInfinity) {
  for (const uint32_t payload : {0x7f800001u, 0x7fc00000u, 0x7fffffffu}) {
    const uint32_t positive = d_.encode(float_from_bits(payload)),
                   negative = d_.encode(float_from_bits(payload | 1u << 31));
    if (d_.nan_code < 0) {
      EXPECT_EQ(positive, 0u);
      EXPECT_EQ(negative, 0u);
      continue;
    }
    EXPECT_TRUE(std::isnan(d_.decode(positive))) << d_.name;
    EXPECT_EQ(negative, d_.saturates ? positive : positive | d_.sign_bit()) << d_.name;  // FP8 drops the sign
  }
  if (d_.nan_code >= 0) {
    EXPECT_EQ(d_.encode(std::numeric_limits<float>::quiet_NaN()), d_.nan_code);
  }
  const uint32_t beyond = d_.saturates ? d_.finite - 1 : d_.finite;
  EXPECT_EQ(d_.encode(kInf), beyond);
  EXPECT_EQ(d_.encode(-kInf), beyond | d_.sign_bit());
}

INSTANTIATE_TEST_SUITE_P(Formats, FloatFormat, testing::Range(0, 5),
                         [](const auto& info) { return definitions()[info.param].name; });

// The table of the OCP microscaling specification, as written there.
TEST(E2m1, HasTheValuesOfTheSpecification) {
  const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (uint8_t code = 0; code < 8; ++code) EXPECT_EQ(E2m1::decode(code), values[code]);
}

TEST(LargestAndSmallest, AreThoseOfTheSpecifications) {
  EXPECT_EQ(E4m3::decode(0x7e), 448.0f);
  EXPECT_EQ(E4m3::decode(0x01), 0x1p-9f);
  EXPECT_EQ(E5m2::decode(0x7b), 57344.0f);
  EXPECT_EQ(E5m2::decode(0x01), 0x1p-16f);
  EXPECT_EQ(code_range(QF_FP8_E4M3).symmetric_max, 448.0f);
  EXPECT_EQ(code_range(QF_FP8_E5M2).symmetric_max, 57344.0f);
  EXPECT_EQ(code_range(QF_FP4_E2M1).symmetric_max, 6.0f);
  EXPECT_EQ(code_range(QF_INT8).symmetric_max, 127.0f);
  EXPECT_EQ(code_range(QF_INT4).symmetric_max, 7.0f);
}

// The tables that vector kernels load, and the numbers that the rest of the library decodes.
TEST(Codebooks, AreTheNumbersOfTheirCodes) {
  const auto expect_table = [](qf_format format, const float* table) {
    for (int code = 0; code < 16; ++code) {
      const auto byte = static_cast<uint8_t>(code);
      EXPECT_EQ(float_bits(table[code]), float_bits(decode_at(format, &byte, 0)))
          << format_name(format) << " " << code;
    }
  };
  expect_table(QF_INT4, kValuesOf<QF_INT4>.values);
  for (const qf_format format : {QF_FP4_E2M1, QF_NF4, QF_FP4_BNB, QF_IQ4_NL}) {
    expect_table(format, codebook_of(format));
    float largest = 0;
    for (int code = 0; code < 16; ++code) largest = std::max(largest, std::abs(codebook_of(format)[code]));
    EXPECT_EQ(largest, code_range(format).symmetric_max) << format_name(format);
  }
  EXPECT_TRUE(std::is_sorted(codebook_of(QF_NF4), codebook_of(QF_NF4) + 16));
  EXPECT_EQ(codebook_of(QF_NF4)[7], 0.0f);
}

TEST(E8m0, IsAPowerOfTwo) {
  for (int code = 0; code < 255; ++code) {
    ASSERT_EQ(E8m0::decode(static_cast<uint8_t>(code)), std::ldexp(1.0f, code - 127));
  }
  EXPECT_TRUE(std::isnan(E8m0::decode(255)));
}

TEST(E8m0, EncodesThePowerOfTwoBelow) {
  for (int exponent = -126; exponent <= 127; ++exponent) {
    const float power = std::ldexp(1.0f, exponent);
    for (const float x : {power, power * 1.5f, std::nextafter(power * 1.999f, power)}) {
      ASSERT_EQ(E8m0::decode(E8m0::encode_floor(x)), power) << x;
    }
  }
  EXPECT_EQ(E8m0::encode_floor(kInf), 254);
  for (const float x : {0.0f, -0.0f, -1.0f, -kInf, std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_EQ(E8m0::encode_floor(x), E8m0::kNan) << x;
  }
}

// 2^(floor(log2(amax)) - emax), held within what E8M0 has.
TEST(E8m0, ScaleOfABlock) {
  std::mt19937 random(11);
  for (const qf_format format : {QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1}) {
    const int emax = static_cast<int>(std::floor(std::log2(code_range(format).symmetric_max)));
    ASSERT_EQ(code_range(format).emax, emax) << format_name(format);
    for (int i = 0; i < 20000; ++i) {
      const float amax = float_from_bits(random() & 0x7fffffff);
      if (!std::isfinite(amax) || amax < std::numeric_limits<float>::min()) continue;
      const int expected = std::max(std::ilogb(amax) - emax, -127);
      ASSERT_EQ(E8m0::decode(e8m0_from_amax(amax, emax)), std::ldexp(1.0f, expected)) << amax;
    }
    EXPECT_EQ(e8m0_from_amax(0.0f, emax), 0);
    EXPECT_EQ(e8m0_from_amax(0x1p-149f, emax), 0);
  }
}

TEST(ScaleFromAmax, IsTheQuotientWithinTheNormalFloats) {
  const float largest = std::numeric_limits<float>::max(), smallest = std::numeric_limits<float>::min();
  EXPECT_EQ(scale_from_amax(127.0f, 127.0f), 1.0f);
  EXPECT_EQ(scale_from_amax(3.0f, 7.0f), 3.0f / 7.0f);
  EXPECT_EQ(scale_from_amax(0.0f, 127.0f), smallest);
  EXPECT_EQ(scale_from_amax(smallest, 448.0f), smallest);
  EXPECT_EQ(scale_from_amax(largest, 127.0f), largest / 127.0f);
  EXPECT_EQ(scale_from_amax(kInf, 127.0f), largest / 127.0f);
}

int expected_integer(float x, int zero, int lowest, int highest) {
  if (std::isnan(x)) return 0;
  const double rounded = std::nearbyint(static_cast<double>(x));  // to nearest, ties to even
  return static_cast<int>(
      std::clamp(rounded + zero, static_cast<double>(lowest), static_cast<double>(highest)));
}

TEST(Integers, RoundAndSaturate) {
  std::mt19937 random(5);
  std::vector<float> inputs = {kInf,
                               -kInf,
                               1e30f,
                               -1e30f,
                               0.0f,
                               -0.0f,
                               std::numeric_limits<float>::quiet_NaN(),
                               -std::numeric_limits<float>::quiet_NaN()};
  for (int i = -1200; i <= 1200; ++i) {  // every half, which is every tie, and its neighbours
    const float x = static_cast<float>(i) * 0.5f;
    for (const float near : {x, std::nextafter(x, kInf), std::nextafter(x, -kInf)}) inputs.push_back(near);
  }
  for (int i = 0; i < 20000; ++i) inputs.push_back(float_from_bits(random()));
  for (const float x : inputs) {
    for (const int zero : {0, 1, -1, 7, -8, 127, -128}) {
      uint8_t code = encode_value(QF_INT8, x, zero);
      ASSERT_EQ(static_cast<int8_t>(code), expected_integer(x, zero, -128, 127)) << x << " zero " << zero;
      code = encode_value(QF_INT4, x, zero);
      ASSERT_LT(code, 16);
      ASSERT_EQ(int4_at(&code, 0), expected_integer(x, zero, -8, 7)) << x << " zero " << zero;
    }
  }
}

// Written in order into a row of garbage, read back one by one: an odd row ends with a zero nibble.
TEST(Codes, ArePackedLowNibbleFirst) {
  std::mt19937 random(3);
  for (const qf_format format : {QF_INT8, QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2, QF_FP4_E2M1}) {
    for (int64_t count = 1; count <= 9; ++count) {
      const int64_t bytes = is_packed_4bit(format) ? (count + 1) / 2 : count;
      ASSERT_EQ(row_bytes(format, count), bytes);
      std::vector<uint8_t> row(static_cast<size_t>(bytes) + 1, 0xa5), codes;
      for (int64_t i = 0; i < count; ++i) {
        codes.push_back(static_cast<uint8_t>(random() & (is_packed_4bit(format) ? 15 : 0x77)));
        store_code(format, row.data(), i, codes.back());
      }
      for (int64_t i = 0; i < count; ++i) {
        const uint8_t code = codes[static_cast<size_t>(i)];
        const int as_int4 = code < 8 ? code : code - 16;
        const float expected = format == QF_INT8       ? static_cast<float>(static_cast<int8_t>(code))
                               : format == QF_INT4     ? static_cast<float>(as_int4)
                               : format == QF_FP8_E4M3 ? E4m3::decode(code)
                               : format == QF_FP8_E5M2 ? E5m2::decode(code)
                                                       : E2m1::decode(code);
        ASSERT_EQ(decode_at(format, row.data(), i), expected)
            << format_name(format) << " at " << i << " of " << count;
      }
      if (is_packed_4bit(format)) {
        ASSERT_EQ(row[0] & 15, codes[0]);
        if (count % 2) {
          ASSERT_EQ(row[static_cast<size_t>(bytes) - 1] >> 4, 0);
        }
      }
      ASSERT_EQ(row.back(), 0xa5) << "a byte behind the row was written";
    }
  }
}

}  // namespace
}  // namespace quantfuse
