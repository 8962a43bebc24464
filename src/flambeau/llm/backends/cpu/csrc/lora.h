// LoRA adapters: the outputs of a layer become scale * y + shift + B * A * x, for the rows that have an adapter. A layer
// that was trained as a whole scales them by 0 and adds those of its own matrix.
//
// Every row is summed in the same order whatever other rows there are: it gets the same bits in any batch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "matrix.h"
#include "threads.h"
#include "vectors.h"

namespace flambeau {

struct LoraPart {
  const float *a, *b;  // [rank, inputs], [rank, count]: B is transposed
  int64_t rank, start, count;  // outputs from start on
  const Matrix* matrix;        // in the place of A and B, or null
};

struct LoraLayer {
  const LoraPart* parts = nullptr;
  int64_t num_parts = 0;
  const float *scale = nullptr, *shift = nullptr;  // of all outputs, or null

  bool is_empty() const { return !num_parts && !shift; }
};

constexpr int64_t kLoraRows = 4;  // rows of one adapter that share what is read of it
constexpr int kLoraRanks = 4;

// The products [rows, ranks] of neighboring rows of x with neighboring rows of A: several sums, so that none waits.
template <int rows, int ranks>
inline void lora_dots(const float* x, const float* a, float* out, int64_t size, int64_t stride) {
  Floats sums[rows][ranks] = {};
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t k = 0; k < whole; k += kLanes) {
    Floats part[ranks];
    for (int r = 0; r < ranks; ++r) part[r] = load(a + r * size + k);
    for (int m = 0; m < rows; ++m) {
      const Floats row = load(x + m * size + k);
      for (int r = 0; r < ranks; ++r) sums[m][r] += row * part[r];
    }
  }
  for (int m = 0; m < rows; ++m)
    for (int r = 0; r < ranks; ++r) {
      float total = sum(sums[m][r]);
      for (int64_t k = whole; k < size; ++k) total += x[m * size + k] * a[r * size + k];
      out[m * stride + r] = total;
    }
}

// out [rows, width] += B times A times x [rows, size].
template <int rows>
inline void add_lora_part(const LoraPart& part, const float* x, float* out, int64_t size, int64_t width) {
  std::vector<float> inner(rows * part.rank);
  int64_t first = 0;
  for (; first + kLoraRanks <= part.rank; first += kLoraRanks)
    lora_dots<rows, kLoraRanks>(x, part.a + first * size, &inner[first], size, part.rank);
  for (; first < part.rank; ++first) lora_dots<rows, 1>(x, part.a + first * size, &inner[first], size, part.rank);
  const int64_t whole = part.count / kLanes * kLanes;
  for (int64_t n = 0; n < whole; n += kLanes) {
    Floats sums[rows] = {};
    for (int64_t r = 0; r < part.rank; ++r) {
      const Floats column = load(part.b + r * part.count + n);
      for (int m = 0; m < rows; ++m) sums[m] += inner[m * part.rank + r] * column;
    }
    for (int m = 0; m < rows; ++m) {
      float* to = out + m * width + part.start + n;
      write(load(to) + sums[m], to);
    }
  }
  for (int64_t n = whole; n < part.count; ++n)
    for (int m = 0; m < rows; ++m) {
      float total = 0;
      for (int64_t r = 0; r < part.rank; ++r) total += inner[m * part.rank + r] * part.b[r * part.count + n];
      out[m * width + part.start + n] += total;
    }
}

template <int most>
inline void add_lora_rows(int64_t num_rows, const LoraPart& part, const float* x, float* out, int64_t size,
                          int64_t width) {
  if constexpr (most > 1)
    if (num_rows < most) return add_lora_rows<most - 1>(num_rows, part, x, out, size, width);
  add_lora_part<most>(part, x, out, size, width);
}

// The parts that are whole matrices. `space` holds their outputs.
inline void add_matrices(const LoraLayer& layer, const float* x, float* out, int64_t num_rows, int64_t width,
                         std::vector<float>& space, int num_threads) {
  for (int64_t i = 0; i < layer.num_parts; ++i) {
    const LoraPart& part = layer.parts[i];
    if (!part.matrix) continue;
    space.resize(num_rows * part.count);
    part.matrix->multiply(x, space.data(), num_rows, false, num_threads);
    for (int64_t m = 0; m < num_rows; ++m)
      for (int64_t n = 0; n < part.count; ++n) out[m * width + part.start + n] += space[m * part.count + n];
  }
}

// Does to each row what its adapter says. `layers` has the layer in each adapter, `stride` apart; adapter 0 is none.
inline void add_lora(const int64_t* adapters, const LoraLayer* layers, int64_t stride, const float* x, float* out,
                     int64_t num_rows, int64_t size, int64_t width, int num_threads) {
  struct Group {
    int64_t first, count;
  };
  std::vector<Group> groups;
  bool has_matrices = false;
  for (int64_t first = 0, end; first < num_rows; first = end) {
    for (end = first + 1; end < num_rows && end < first + kLoraRows && adapters[end] == adapters[first];) ++end;
    const LoraLayer& layer = layers[adapters[first] * stride];
    if (!adapters[first] || layer.is_empty()) continue;
    groups.push_back({first, end - first});
    for (int64_t i = 0; i < layer.num_parts; ++i) has_matrices |= layer.parts[i].matrix != nullptr;
  }
  Threads::of_process().share(static_cast<int64_t>(groups.size()), num_threads, [&](int64_t task) {
    const Group group = groups[task];
    const LoraLayer& layer = layers[adapters[group.first] * stride];
    for (int64_t m = group.first; m < group.first + group.count; ++m) {
      float* row = out + m * width;
      if (layer.scale)
        for (int64_t n = 0; n < width; ++n) row[n] *= layer.scale[n];
      if (layer.shift)
        for (int64_t n = 0; n < width; ++n) row[n] += layer.shift[n];
    }
    for (int64_t i = 0; i < layer.num_parts; ++i)
      if (!layer.parts[i].matrix)
        add_lora_rows<kLoraRows>(group.count, layer.parts[i], x + group.first * size, out + group.first * width, size,
                                 width);
  });
  if (!has_matrices) return;
  std::vector<float> space;
  for (int64_t first = 0, end; first < num_rows; first = end) {
    for (end = first + 1; end < num_rows && adapters[end] == adapters[first];) ++end;
    if (adapters[first])
      add_matrices(layers[adapters[first] * stride], x + first * size, out + first * width, end - first, width, space,
                   num_threads);
  }
}

}  // namespace flambeau
