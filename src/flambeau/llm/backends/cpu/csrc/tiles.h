// Products of tiles of sixteen rows and sixteen columns: Intel's AMX. Without it, nothing of this is compiled.
//
// Tiles 0 to 3 are sums, 4 and 5 hold rows of inputs, 6 and 7 columns of weights. A row of a tile is a cache line.
#pragma once
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define FLAMBEAU_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace flambeau {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;           // of a row
constexpr int64_t kBytesOfInputs = 1 << 20;  // that all panels are multiplied with, one after another: they stay in a cache

// The kernel of the system keeps the registers of tiles for processes that ask for it. It may refuse.
inline bool may_use_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool may = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return may;
}

// Of a group of 32, 64, 96 or 128 bytes, what one tile multiplies.
constexpr int64_t tile_bytes(int64_t group) { return group % kTileBytes ? kTileBytes / 2 : kTileBytes; }

// The shapes of the tiles, while a thread uses them: `bytes` of an input are in a row, and of a column in a tile. Fewer
// rows of inputs than sixteen take less time.
class TileShapes {
 public:
  explicit TileShapes(int64_t bytes, int64_t rows = kTileRows) {
    for (int tile = 0; tile < 8; ++tile) {
      const bool is_input = tile == 4 || tile == 5, is_weight = tile >= 6;
      operand_.row_bytes[tile] = static_cast<uint16_t>(is_input ? bytes : kTileBytes);
      operand_.rows[tile] = static_cast<uint8_t>(is_weight ? bytes / 4 : rows);
    }
    _tile_loadconfig(&operand_);
  }
  ~TileShapes() { _tile_release(); }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

 private:
  struct alignas(64) {
    uint8_t palette = 1, first_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } operand_;
};

}  // namespace flambeau
#endif
