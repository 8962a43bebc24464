// Vectors that are wider than a register: pairs of vectors, each perhaps a pair again.
//
// Compilers accept vectors of any size, but GCC keeps those that no register holds in memory: with AVX2, products of
// such vectors took 15 to 50 times as long as with AVX-512.
#pragma once
#include <cstring>
#include <type_traits>
#include <utility>

namespace flambeau {

#if defined(__AVX512F__)
constexpr int kLanesOfRegister = 16;  // of 32 bits
#elif defined(__AVX2__)
constexpr int kLanesOfRegister = 8;
#else
constexpr int kLanesOfRegister = 4;
#endif

template <typename Half>
struct Pair {
  Half low, high;
};

template <typename Vector>
constexpr bool is_pair = false;
template <typename Half>
constexpr bool is_pair<Pair<Half>> = true;

template <typename Number, int lanes>
struct WideVector {
  using type = Pair<typename WideVector<Number, lanes / 2>::type>;
};
template <typename Number>
struct WideVector<Number, kLanesOfRegister> {
  typedef Number type __attribute__((vector_size(sizeof(Number) * kLanesOfRegister)));
};

#define FLAMBEAU_OPERATOR(op)                                                                    \
  template <typename Half, typename Other>                                                       \
  inline auto operator op(const Pair<Half>& a, const Pair<Other>& b) {                           \
    return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};                     \
  }                                                                                              \
  template <typename Half, typename Scalar, typename = std::enable_if_t<!is_pair<Scalar>>>       \
  inline auto operator op(const Pair<Half>& a, Scalar b) {                                       \
    return Pair<decltype(a.low op b)>{a.low op b, a.high op b};                                  \
  }                                                                                              \
  template <typename Half, typename Scalar, typename = std::enable_if_t<!is_pair<Scalar>>>       \
  inline auto operator op(Scalar a, const Pair<Half>& b) {                                       \
    return Pair<decltype(a op b.low)>{a op b.low, a op b.high};                                  \
  }
FLAMBEAU_OPERATOR(+)
FLAMBEAU_OPERATOR(-)
FLAMBEAU_OPERATOR(*)
FLAMBEAU_OPERATOR(/)
FLAMBEAU_OPERATOR(&)
FLAMBEAU_OPERATOR(|)
FLAMBEAU_OPERATOR(^)
FLAMBEAU_OPERATOR(<<)
FLAMBEAU_OPERATOR(>>)
FLAMBEAU_OPERATOR(<)
FLAMBEAU_OPERATOR(>)
FLAMBEAU_OPERATOR(>=)
FLAMBEAU_OPERATOR(==)
FLAMBEAU_OPERATOR(!=)
#undef FLAMBEAU_OPERATOR

template <typename Half>
inline Pair<Half> operator-(const Pair<Half>& a) {
  return {-a.low, -a.high};
}

template <typename Half, typename Other>
inline Pair<Half>& operator+=(Pair<Half>& a, const Other& b) {
  return a = a + b;
}

template <typename Half, typename Other>
inline Pair<Half>& operator&=(Pair<Half>& a, const Other& b) {
  return a = a & b;
}

template <typename Half, typename Other>
inline Pair<Half>& operator^=(Pair<Half>& a, const Other& b) {
  return a = a ^ b;
}

// The functions below are for pairs and for vectors alike.

template <typename Vector>
inline Vector read(const void* from) {
  Vector x;
  if constexpr (is_pair<Vector>) {  // not as a whole, which would have to be in memory
    using Half = decltype(x.low);
    return {read<Half>(from), read<Half>(static_cast<const char*>(from) + sizeof(Half))};
  } else {
    std::memcpy(&x, from, sizeof x);
    return x;
  }
}

template <typename Vector>
inline void write(const Vector& x, void* to) {
  if constexpr (is_pair<Vector>) {
    write(x.low, to), write(x.high, static_cast<char*>(to) + sizeof x.low);
  } else {
    std::memcpy(to, &x, sizeof x);
  }
}

// The same bits as another type.
template <typename To, typename From>
inline To as(const From& x) {
  if constexpr (is_pair<From>) {
    using Half = decltype(To::low);
    return {as<Half>(x.low), as<Half>(x.high)};
  } else {
    return reinterpret_cast<To>(x);
  }
}

// The same numbers as another type.
template <typename To, typename From>
inline To converted(const From& x) {
  if constexpr (is_pair<From>) {
    using Half = decltype(To::low);
    return {converted<Half>(x.low), converted<Half>(x.high)};
  } else {
    return __builtin_convertvector(x, To);
  }
}

// The first number where a comparison is true, else the second.
template <typename Mask, typename Vector>
inline Vector chosen(const Mask& mask, const Vector& a, const Vector& b) {
  if constexpr (is_pair<Vector>) {
    return {chosen(mask.low, a.low, b.low), chosen(mask.high, a.high, b.high)};
  } else {
    return mask ? a : b;
  }
}

template <typename Vector>
inline Vector larger(const Vector& a, const Vector& b) {
  return chosen(a > b, a, b);
}

template <typename Vector>
inline auto lower_half(const Vector& x) {
  if constexpr (is_pair<Vector>) {
    return x.low;
  } else if constexpr (sizeof x == 64) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
  } else {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3);
  }
}

template <typename Vector>
inline auto upper_half(const Vector& x) {
  if constexpr (is_pair<Vector>) {
    return x.high;
  } else if constexpr (sizeof x == 64) {
    return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  } else {
    return __builtin_shufflevector(x, x, 4, 5, 6, 7);
  }
}

}  // namespace flambeau
