// Vectors of sixteen floats, the types of numbers in memory, and a fast exponential.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "wide_vectors.h"

// Compiled once instead of in every caller: the library is built on the machine that uses it.
#define FLAMBEAU_ONCE __attribute__((noinline))

namespace flambeau {

constexpr int kLanes = 16;
using Floats = WideVector<float, kLanes>::type;
using Words = WideVector<uint32_t, kLanes>::type;
using Ints = WideVector<int32_t, kLanes>::type;
using Halves = WideVector<uint16_t, kLanes>::type;
enum class bfloat : uint16_t {};  // the upper half of a float's bits
enum class half : uint16_t {};    // IEEE's float16
enum class byte : int8_t {};      // a multiple of a scale that is kept elsewhere

inline Floats load(const float* from) { return read<Floats>(from); }

inline Floats load(const bfloat* from) {
#if defined(__AVX512F__)  // GCC would widen two halves and join them
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return reinterpret_cast<Floats>(_mm512_slli_epi32(wide, 16));
#else
  return as<Floats>(converted<Words>(read<Halves>(from)) << 16);
#endif
}

// Sixteen small integers from bytes and to bytes; compilers convert them one by one.
inline Ints load_bytes(const int8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256i upper = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes));
  return {as<decltype(Ints::low)>(_mm256_cvtepi8_epi32(bytes)), as<decltype(Ints::low)>(upper)};
#else
  int32_t numbers[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = from[lane];
  return read<Ints>(numbers);
#endif
}

template <typename target>
inline void store_bytes(const Ints& x, target* to) {
  static_assert(sizeof(target) == 1);
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
#else
  int32_t numbers[kLanes];
  write(x, numbers);
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<target>(numbers[lane]);
#endif
}

inline Floats load(const byte* from) {
  return converted<Floats>(load_bytes(reinterpret_cast<const int8_t*>(from)));
}

inline Floats load(const half* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i* parts = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(parts)), _mm256_cvtph_ps(_mm_loadu_si128(parts + 1))};
#else
  const Words wide = converted<Words>(read<Halves>(from)), magnitude = (wide & 0x7fff) << 13;
  const Words scaled = as<Words>(as<Floats>(magnitude) * 0x1p112f);
  const Words number = chosen((wide & 0x7c00) == 0x7c00, magnitude | 0x7f800000, scaled);  // infinite and NaN stay so
  return as<Floats>(number | (wide & 0x8000) << 16);
#endif
}

inline void narrow(float x, float* to) { *to = x; }

inline void narrow(float x, bfloat* to) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  *to = static_cast<bfloat>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void narrow(float x, half* to) {  // to the nearest, ties to even
  uint32_t bits, shifted;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  uint32_t result;
  if (size >= 0x47800000) {  // too large, infinite or NaN
    result = size > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (size < 0x38800000) {  // the addition rounds to a multiple of the smallest number
    const float sum = std::fabs(x) + 0.5f;
    std::memcpy(&shifted, &sum, 4);
    result = shifted - 0x3f000000;
  } else {
    result = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
  }
  *to = static_cast<half>(sign | result);
}

// The same for many numbers.
template <typename target>
inline void narrow(const float* from, int64_t size, target* to) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats x = load(from + i);
    if constexpr (std::is_same_v<target, bfloat>) {
      const Words bits = as<Words>(x);
      write(converted<Halves>((bits + 0x7fff + (bits >> 16 & 1)) >> 16), to + i);
    } else if constexpr (std::is_same_v<target, half>) {
#if defined(__AVX512F__)
      const __m256i halves = _mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), halves);
#elif defined(__AVX2__) && defined(__F16C__)
      const __m128i low = _mm256_cvtps_ph(as<__m256>(x.low), _MM_FROUND_TO_NEAREST_INT);
      const __m128i high = _mm256_cvtps_ph(as<__m256>(x.high), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), low);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i + 8), high);
#else
      for (int lane = 0; lane < kLanes; ++lane) narrow(from[i + lane], to + i + lane);
#endif
    } else {
      write(x, to + i);
    }
  }
  for (; i < size; ++i) narrow(from[i], to + i);
}

constexpr float kRoundShift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded number in the lowest bits

// To the nearest integer, ties to even; for sizes below 2^22.
inline Ints rounded(const Floats& x) {
  const Floats shifted = x + kRoundShift;
  return as<Ints>(shifted) - 0x4b400000;
}

inline Floats magnitude(const Floats& x) { return chosen(x < 0.0f, -x, x); }

using Quarter = float __attribute__((vector_size(kLanes)));

inline float largest(const Floats& x) {
  const auto half = larger(lower_half(x), upper_half(x));
  const Quarter four = larger(lower_half(half), upper_half(half));
  return std::max(std::max(four[0], four[1]), std::max(four[2], four[3]));
}

// The sums of lanes i, i + 4, i + 8 and i + 12.
template <typename Vector>
inline auto fold(const Vector& x) {
  const auto half = lower_half(x) + upper_half(x);
  return lower_half(half) + upper_half(half);
}

template <typename Vector>
inline auto sum(const Vector& x) {
  const auto quarter = fold(x);
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

struct Quantized {
  float scale;
  int32_t sum;  // of the small integers
};

// Small integers and the scale that turns them into the numbers; the scale of what is not finite is not finite.
inline Quantized quantize_bytes(const float* x, int64_t size, int8_t* to) {
  Floats high{}, invalid{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats number = load(x + i), size_of = magnitude(number);
    high = larger(size_of, high);
    invalid += number - number;  // NaN for what is not finite
  }
  const float highest = largest(high), inverse = highest > 1e-30f ? 127.0f / highest : 0.0f;
  Ints total{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Ints steps = rounded(load(x + i) * inverse);
    store_bytes(steps, to + i);
    total += steps;
  }
  return {highest / 127.0f + sum(invalid), sum(total)};
}

// The sums of four vectors, added in the order of `sum`.
inline Quarter sums_of(const Floats* x) {
  const Quarter a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
  const Quarter ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Quarter cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// Not below, not above a limit; what is not a number stays.
template <typename X>
inline X at_least(const X& x, float limit) {
  return chosen(x < limit, X{} + limit, x);
}
template <typename X>
inline X at_most(const X& x, float limit) {
  return chosen(x > limit, X{} + limit, x);
}

// For x from -87 to 87, one number or a vector; relative error about 1e-7.
template <typename X>
inline X exponential(const X& x) {
  constexpr bool is_one = std::is_same_v<X, float>;
  using Counts = std::conditional_t<is_one, int32_t, Ints>;
  Counts turns;
  X whole;
  if constexpr (is_one) {
    whole = std::floor(x * 1.44269504f + 0.5f), turns = static_cast<int32_t>(whole);
  } else {
    turns = rounded(x * 1.44269504f), whole = converted<Floats>(turns);
  }
  const X rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
  X series = rest * (1.0f / 5040) + 1.0f / 720;
  series = series * rest + 1.0f / 120;
  series = series * rest + 1.0f / 24;
  series = series * rest + 1.0f / 6;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  if constexpr (is_one) {
    const uint32_t bits = static_cast<uint32_t>(turns + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return series * power;
  } else {
    return series * as<Floats>((turns + 127) << 23);
  }
}

}  // namespace flambeau
