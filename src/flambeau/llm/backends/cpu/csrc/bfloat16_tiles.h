// Linear layers with bfloat16 weights, and inputs rounded to bfloat16, by tiles: see tiles.h.
//
// All rows are multiplied so, also one alone: a row gets the same bits in any batch.
#pragma once
#include <vector>

#include "panels.h"
#include "tiles.h"

#if defined(FLAMBEAU_TILES)
namespace flambeau {

constexpr int64_t kNumbersOfTile = 32;                // of a row
constexpr int64_t kInputWords = kTileRows * kLanes;   // of a tile of inputs, two numbers each
constexpr int64_t kWeightWords = kTileRows * kPanel;  // of the two tiles with the same 32 rows of a panel

// A row of inputs [size] as a row of tiles: [rows / 16, blocks, 16, 32]. What is missing at the ends is zero.
inline void round_to_tiles(const float* x, int64_t num_rows, int64_t size, int64_t row, uint32_t* tiles) {
  const int64_t blocks = (size + kNumbersOfTile - 1) / kNumbersOfTile;
  uint32_t* to = tiles + row / kTileRows * blocks * kInputWords + row % kTileRows * kLanes;
  for (int64_t k = 0; k < size; k += kNumbersOfTile, to += kInputWords) {
    const int64_t count = row < num_rows ? std::min(kNumbersOfTile, size - k) : 0;
    if (count < kNumbersOfTile) std::fill_n(to, kLanes, 0u);
    if (count > 0) narrow(x + row * size + k, count, reinterpret_cast<bfloat*>(to));
  }
}

// A panel of pairs as tiles, 32 rows at a time.
struct TiledPanel {
  const uint32_t* panel;
  int64_t whole_blocks;
  alignas(64) uint32_t rest[kWeightWords];  // the last rows, if they are fewer

  TiledPanel(const uint32_t* own, int64_t words) : panel(own), whole_blocks(words / kWeightWords) {
    if (words % kWeightWords == 0) return;
    std::fill_n(rest, kWeightWords, 0u);
    std::copy(own + whole_blocks * kWeightWords, own + words, rest);
  }

  void load(int64_t number) const {
    const uint32_t* weights = number < whole_blocks ? panel + number * kWeightWords : rest;
    _tile_loadd(6, weights, 2 * kTileBytes);
    _tile_loadd(7, weights + kLine, 2 * kTileBytes);
  }
};

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void store_sums(float* sums) {  // [2, 16, 32]
  constexpr int64_t line = 2 * kTileBytes;
  _tile_stored(0, sums, line);
  _tile_stored(1, sums + kLanes, line);
  _tile_stored(2, sums + kTileRows * kPanel, line);
  _tile_stored(3, sums + kTileRows * kPanel + kLanes, line);
}

// Two tiles of rounded rows, from `tiles` on, with a panel; the second one may be missing.
inline void multiply_rounded(const uint32_t* tiles, bool has_two, const TiledPanel& panel, int64_t blocks, float* sums) {
  const uint32_t* others = tiles + blocks * kInputWords;
  zero_sums();
  for (int64_t number = 0; number < blocks; ++number, tiles += kInputWords, others += kInputWords) {
    panel.load(number);
    _tile_loadd(4, tiles, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!has_two) continue;
    _tile_loadd(5, others, kTileBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  store_sums(sums);
}

inline void multiply_by_tiles(const float* x, const uint32_t* weights, const float* bias, float* out, int64_t num_rows,
                              int64_t size, int64_t width, int64_t stride, bool adds, int num_threads) {
  static thread_local std::vector<uint32_t> of_thread;
  std::vector<uint32_t>& inputs = of_thread;  // the caller's, also in the other threads
  const int64_t blocks = (size + kNumbersOfTile - 1) / kNumbersOfTile, tile = blocks * kInputWords;
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows, words = (size + 1) / 2 * kPanel;
  if (static_cast<int64_t>(inputs.size()) < num_tiles * tile) inputs.resize(num_tiles * tile);
  Threads::of_process().share(num_tiles, num_threads, [&](int64_t task) {
    for (int64_t m = task * kTileRows; m < (task + 1) * kTileRows; ++m)
      round_to_tiles(x, num_rows, size, m, inputs.data());
  });
  const int64_t most_tiles = std::max<int64_t>(2, kBytesOfInputs / (tile * 4) / 2 * 2);
  for (int64_t start = 0; start < num_tiles; start += most_tiles) {
    const int64_t end = std::min(num_tiles, start + most_tiles);
    share_panels(width, words * 4, num_threads, [&](int64_t panel) {
      const TileShapes shapes(kTileBytes, std::min(num_rows, kTileRows));
      const TiledPanel own(weights + panel * words, words);
      const int64_t n = panel * kPanel;
      const Columns columns{out + n, bias ? bias + n : nullptr, stride, std::min(kPanel, width - n), adds};
      for (int64_t first = start; first < end; first += 2) {
        alignas(64) float sums[2 * kTileRows * kPanel];
        multiply_rounded(inputs.data() + first * tile, first + 1 < end, own, blocks, sums);
        const int64_t row = first * kTileRows, count = std::min(2 * kTileRows, num_rows - row);
        for (int64_t m = 0; m < count; ++m)
          columns.store(row + m, load(sums + m * kPanel), load(sums + m * kPanel + kLanes));
      }
    });
  }
}

}  // namespace flambeau
#endif
