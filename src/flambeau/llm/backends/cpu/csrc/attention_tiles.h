// Attention of many tokens of a sequence by tiles: see tiles.h. Keys and values are bfloat16 numbers, or small integers,
// which bfloat16 represents. Queries and weights are sums of two such numbers, the second with what the first leaves:
// 16 bits of a float's 24.
//
// Sums run over places in the same portions for any step: a sequence gets the same bits in any batch.
#pragma once
#include "bfloat16_tiles.h"
#include "paged_step.h"

#if defined(FLAMBEAU_TILES)
namespace flambeau {

constexpr int64_t kWordsOfTile = 16 * kLanes;    // of two numbers each
constexpr int64_t kPlacesAtOnce = 256;           // whose values are arranged for tiles
constexpr int64_t kTilesOfSums = 4;

// Rows [16, stride] of words become columns.
inline void transpose_words(const uint32_t* const* rows, uint32_t* columns) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i]);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88), b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    _mm512_storeu_si512(columns + i * kLanes, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
    _mm512_storeu_si512(columns + (i + 8) * kLanes, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
  }
}

// Thirty-two numbers as two rows of tiles, one of which has what the other leaves.
inline void split(const float* from, float factor, bfloat* high, bfloat* low) {
  for (int64_t i = 0; i < kNumbersOfTile; i += kLanes) {
    const Floats x = load(from + i) * factor;
    alignas(64) float rest[kLanes];
    write(x, rest), narrow(rest, kLanes, high + i);
    write(x - load(high + i), rest), narrow(rest, kLanes, low + i);
  }
}

// A row of the cache as numbers of bfloat16, without its scale.
template <int64_t size, typename stored>
inline const bfloat* numbers_of(const stored* row, bfloat* room) {
  if constexpr (std::is_same_v<stored, bfloat>) return row;
  for (int64_t i = 0; i < size; i += kLanes) {
    alignas(64) float numbers[kLanes];
    write(load(row + i), numbers), narrow(numbers, kLanes, room + i);
  }
  return room;
}

// The queries of all heads of a group for consecutive tokens of a sequence, from place `begin` to `end`.
template <int parts, typename stored>
class TiledAttention {
  static constexpr int64_t size = parts * kLanes, blocks = size / kNumbersOfTile;
  static constexpr int64_t room_in_cache = room_of_head<stored>(size), tile = kTileRows * kNumbersOfTile;

 public:
  TiledAttention(const PagedStep<stored>& step, int64_t first, int64_t last, const int64_t* table, int64_t kv_head)
      : step_(step), table_(table), kv_head_(kv_head), first_(first), group_(step.heads / step.kv_heads),
        num_rows_((last - first) * group_), num_tiles_((num_rows_ + kTileRows - 1) / kTileRows),
        seen_(step.first_seen(step.positions[first])), begin_(seen_ / kNumbersOfTile * kNumbersOfTile),
        end_(step.positions[last - 1] + 1),
        room_((end_ - begin_ + kNumbersOfTile) / kNumbersOfTile * kNumbersOfTile) {}

  void run() {
    Space& space = space_of_thread();
    scores_ = grown(space.scores, num_tiles_ * kTileRows * room_);
    sums_ = grown(space.sums, num_tiles_ * kTileRows * size);
    split_queries(grown(space.queries, num_tiles_ * blocks * 2 * tile));
    const TileShapes shapes(kTileBytes);
    for (int64_t place = begin_; place < end_; place += kLanes) score(space.queries.data(), place);
    for (int64_t row = 0; row < num_rows_; ++row) weigh_row(row);
    bfloat* values = grown(space.values, kPlacesAtOnce * size);
    bfloat* weights = grown(space.weights, kPlacesAtOnce / kNumbersOfTile * 2 * tile);
    for (int64_t place = begin_; place < end_; place += kPlacesAtOnce) {
      const int64_t count = std::min(kPlacesAtOnce, begin_ + room_ - place) / kNumbersOfTile;
      for (int64_t i = 0; i < count; ++i) arrange_values(place + i * kNumbersOfTile, values + i * kNumbersOfTile * size);
      for (int64_t row = 0; row < num_rows_; row += kTileRows) add(row, place, count, values, weights);
    }
    for (int64_t row = 0; row < num_rows_; ++row)
      std::copy_n(sums_ + row * size, size, step_.out + (token(row) * step_.heads + head(row)) * size);
  }

 private:
  struct Space {
    std::vector<float> scores, sums;
    std::vector<bfloat> queries, values, weights;
  };

  static Space& space_of_thread() {
    static thread_local Space space;
    return space;
  }

  template <typename Number>
  static Number* grown(std::vector<Number>& numbers, int64_t count) {
    if (static_cast<int64_t>(numbers.size()) < count) numbers.resize(count);
    return numbers.data();
  }

  int64_t token(int64_t row) const { return first_ + row / group_; }
  int64_t head(int64_t row) const { return kv_head_ * group_ + row % group_; }

  const stored* cached(const stored* cache, int64_t place) const {
    const int64_t slot = table_[place / step_.block_size] * step_.block_size + place % step_.block_size;
    return cache + (slot * step_.kv_heads + kv_head_) * room_in_cache;
  }

  // [rows / 16, D / 32, 2, 16, 32]
  void split_queries(bfloat* to) const {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const float* q = step_.q + token(row) * step_.q_stride + head(row) * size;
      bfloat* own = to + row / kTileRows * blocks * 2 * tile + row % kTileRows * kNumbersOfTile;
      for (int64_t d = 0; d < size; d += kNumbersOfTile, own += 2 * tile) split(q + d, step_.scale, own, own + tile);
    }
  }

  // The scores of all rows for sixteen places.
  void score(const bfloat* queries, int64_t place) {
    alignas(64) bfloat numbers[kLanes][size];
    alignas(64) uint32_t keys[size / 2 * kLanes];
    alignas(64) float scales[kLanes];
    const uint32_t* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const stored* key = cached(step_.keys, std::clamp(place + i, seen_, end_ - 1));
      rows[i] = reinterpret_cast<const uint32_t*>(numbers_of<size>(key, numbers[i]));
      scales[i] = scale_of<size>(key);
    }
    for (int64_t block = 0; block < blocks; ++block) {
      transpose_words(rows, keys + block * kWordsOfTile);
      for (int64_t i = 0; i < kLanes; ++i) rows[i] += kLanes;
    }
    float* to = scores_ + place - begin_;
    for (int64_t number = 0; number < num_tiles_; ++number, to += kTileRows * room_) {
      _tile_zero(0);
      for (int64_t block = 0; block < blocks; ++block, queries += 2 * tile) {
        _tile_loadd(6, keys + block * kWordsOfTile, kTileBytes);
        _tile_loadd(4, queries, kTileBytes);
        _tile_loadd(5, queries + tile, kTileBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(0, 5, 6);
      }
      _tile_stored(0, to, room_ * sizeof(float));
      if constexpr (std::is_same_v<stored, byte>)
        for (int64_t m = 0; m < kTileRows; ++m) write(load(to + m * room_) * load(scales), to + m * room_);
    }
  }

  // Places that the token does not see get a weight of zero.
  void weigh_row(int64_t row) {
    const int64_t place = step_.positions[token(row)], seen = step_.first_seen(place) - begin_, stop = place + 1 - begin_;
    float* mine = scores_ + row * room_;
    std::fill(mine, mine + seen, 0.0f);
    weigh(step_, head(row), begin_ + seen, mine + seen, stop - seen);
    std::fill(mine + stop, mine + room_, 0.0f);
    if constexpr (std::is_same_v<stored, byte>)
      for (int64_t i = seen; i < stop; ++i) mine[i] *= scale_of<size>(cached(step_.values, begin_ + i));
  }

  // The values of 32 places as tiles of sixteen columns: [D / 16, 16, 16, 2], with two places next to each other.
  void arrange_values(int64_t place, bfloat* to) const {
    alignas(64) static constexpr bfloat zeros[size] = {};
    alignas(64) bfloat room[2][size];
    const auto row_of = [&](int64_t at, bfloat* own) {
      return at < seen_ || at >= end_ ? zeros : numbers_of<size>(cached(step_.values, at), own);
    };
    for (int64_t pair = 0; pair < kTileRows; ++pair) {
      const bfloat *one = row_of(place + 2 * pair, room[0]), *other = row_of(place + 2 * pair + 1, room[1]);
      for (int64_t d = 0; d < size; d += kLanes) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(one + d)));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(other + d)));
        _mm512_storeu_si512(to + d * kNumbersOfTile + pair * kNumbersOfTile, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    }
  }

  // Adds the values of some portions of places to the sums of sixteen rows.
  void add(int64_t row, int64_t place, int64_t count, const bfloat* values, bfloat* weights) {
    const float* scores = scores_ + row * room_ + place - begin_;
    for (int64_t m = 0; m < kTileRows; ++m)
      for (int64_t i = 0; i < count; ++i) {
        bfloat* own = weights + i * 2 * tile + m * kNumbersOfTile;
        split(scores + m * room_ + i * kNumbersOfTile, 1.0f, own, own + tile);
      }
    constexpr int64_t line = size * sizeof(float);
    constexpr int some = parts % kTilesOfSums == 0 ? kTilesOfSums : 2;
    for (int64_t d = 0; d < size; d += some * kLanes) {
      float* sums = sums_ + row * size + d;
      if (place == begin_) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      } else {
        _tile_loadd(0, sums, line);
        _tile_loadd(1, sums + kLanes, line);
        if constexpr (some == kTilesOfSums) {
          _tile_loadd(2, sums + 2 * kLanes, line);
          _tile_loadd(3, sums + 3 * kLanes, line);
        }
      }
      const bfloat* own = values + d * kNumbersOfTile;
      for (int64_t i = 0; i < count; ++i, own += kNumbersOfTile * size) {
        _tile_loadd(4, weights + i * 2 * tile, kTileBytes);
        _tile_loadd(5, weights + (i * 2 + 1) * tile, kTileBytes);
        _tile_loadd(6, own, kTileBytes);
        _tile_loadd(7, own + tile, kTileBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        if constexpr (some == kTilesOfSums) {
          _tile_loadd(6, own + 2 * tile, kTileBytes);
          _tile_loadd(7, own + 3 * tile, kTileBytes);
          _tile_dpbf16ps(2, 4, 6);
          _tile_dpbf16ps(3, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, sums, line);
      _tile_stored(1, sums + kLanes, line);
      if constexpr (some == kTilesOfSums) {
        _tile_stored(2, sums + 2 * kLanes, line);
        _tile_stored(3, sums + 3 * kLanes, line);
      }
    }
  }

  const PagedStep<stored>& step_;
  const int64_t* table_;
  const int64_t kv_head_, first_, group_, num_rows_, num_tiles_;
  const int64_t seen_, begin_, end_, room_;  // places: the first one that is seen, the first one of a tile
  float *scores_ = nullptr, *sums_ = nullptr;
};

}  // namespace flambeau
#endif
