// Steps of a tiny network with every kind of weights and cache; prints the logits. A processor's results are compared
// with another's.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "logits.h"
#include "pack.h"
#include "quantize.h"
#include "self_test.h"

namespace {

using namespace flambeau;

constexpr int64_t kHidden = 64, kHeads = 4, kKvHeads = 2, kHeadSize = 16, kWide = 96, kVocab = 50, kGroup = 32;
constexpr int64_t kBlock = 16, kBlocks = 5, kMaxLength = 2 * kBlock, kLayers = 2;

std::vector<std::vector<uint32_t>> kept;
int64_t drawn = 0;

// Multiples of 1/512 that bfloat16 and float16 represent.
std::vector<float> numbers(int64_t count) {
  std::vector<float> found(count);
  for (float& number : found) number = static_cast<float>(++drawn * 37 % 129 - 64) / 512;
  return found;
}

Matrix random_matrix(Kind kind, int64_t width, int64_t size) {
  const std::vector<float> weights = numbers(width * size);
  std::vector<bfloat> narrow_ones(width * size);
  for (int64_t i = 0; i < width * size; ++i) narrow(weights[i], &narrow_ones[i]);
  std::vector<uint32_t>& panels = kept.emplace_back((width + kPanel - 1) / kPanel * kPanel * size + 4096);
  if (kind == kInt8)
    quantize_rows<8>(weights.data(), width, size, kGroup, panels.data(), 1);
  else if (kind == kInt4)
    quantize_rows<4>(weights.data(), width, size, kGroup, panels.data(), 1);
  else if (kind == kInt5 || kind == kInt6Scaled)
    with_integers(kind, [&](auto bits, auto has_minimums) {
      std::vector<uint8_t> levels(width * size);
      for (uint8_t& level : levels) level = static_cast<uint8_t>(++drawn * 29 % (1 << bits.value));
      const std::vector<float> scales(width * size / kGroup, 0.25f / (1 << bits.value)), lowest(scales.size(), -0.125f);
      pack_integers<bits.value, has_minimums.value>(levels.data(), scales.data(), lowest.data(), width, size, kGroup,
                                                    panels.data(), 1);
    });
  else if (kind == kBfloat16Pairs)
    pack(narrow_ones.data(), 2, kind, width, size, panels.data(), 1);
  else
    pack(weights.data(), 4, kind, width, size, panels.data(), 1);
  return {kind, panels.data(), nullptr, size, width, kGroup};
}

void run(const Network& network, const std::vector<int64_t>& ids, const std::vector<int64_t>& places,
         const std::vector<int64_t>& starts) {
  const std::vector<int64_t> tables = {1, 2, 3, 4};
  std::vector<int64_t> slots(ids.size());
  for (size_t sequence = 0; sequence + 1 < starts.size(); ++sequence)
    for (int64_t t = starts[sequence]; t < starts[sequence + 1]; ++t)
      slots[t] = tables[sequence * 2 + places[t] / kBlock] * kBlock + places[t] % kBlock;
  const int64_t count = static_cast<int64_t>(ids.size());
  const std::vector<int64_t> state_slots = {2, 1};
  Tokens tokens{ids.data(), places.data(), slots.data(), starts.data(), tables.data(), count, 2, 2};
  tokens.state_slots = state_slots.data();
  std::vector<float> logits(count * kVocab);
  Pass(network, tokens, 1).run(nullptr, count, logits.data());
  for (const float logit : logits) std::printf(" %.6g", static_cast<double>(logit));
}

// A recurrence of this kind: heads of 20, states of 18, so that some numbers fill no vector.
Recurrence random_recurrence(RecurrentKind kind, std::vector<std::vector<float>>& floats) {
  const auto some = [&](int64_t count, float shift = 0) {
    std::vector<float> found = numbers(count);
    for (float& number : found) number += shift;
    return floats.emplace_back(found).data();
  };
  Recurrence made{};
  made.kind = kind, made.width = 4, made.heads = 4, made.head_size = 20, made.inner = 80, made.rank = 5;
  made.state_size = 18, made.groups = 2, made.norm_groups = kind == kDeltaNet ? 4 : 1, made.gates_first = 1;
  const bool is_wide = kind == kMamba2 || kind == kDeltaNet;
  made.channels = is_wide ? made.inner + 2 * made.groups * made.state_size : made.inner;
  const int64_t widths[] = {3 * made.inner, 2 * made.inner, made.inner + made.channels + made.heads, made.channels};
  made.in = random_matrix(kFloat32, widths[kind], kHidden), made.out = random_matrix(kFloat32, kHidden, made.inner);
  made.gate = random_matrix(kFloat32, made.inner, kHidden), made.beta = random_matrix(kFloat32, made.heads, kHidden);
  made.time = kind == kMamba ? random_matrix(kFloat32, made.inner, made.rank) : random_matrix(kFloat32, made.heads, kHidden);
  made.parameters = random_matrix(kFloat32, made.rank + 2 * made.state_size, made.inner);
  made.conv_weight = some(made.width * made.channels, 0.2f), made.conv_bias = some(made.channels);
  made.time_bias = some(made.inner), made.decay = some(made.inner * made.state_size, -1), made.skip = some(made.inner);
  if (is_wide) made.norm = {some(made.inner, 1), nullptr};
  made.epsilon = 1e-5f, made.time_high = 2, made.max_beta = made.input_scale = made.output_scale = 1;
  made.windows = floats.emplace_back(3 * made.channels * (made.width - 1), NAN).data();
  made.states = floats.emplace_back(3 * made.inner * made.state_size, NAN).data();
  return made;
}

void run(Kind kind, Kind cache_kind, const RecurrentKind* recurrent_kind = nullptr) {
  drawn = 0, kept.clear(), kept.reserve(32);
  std::vector<std::vector<float>> floats;
  std::vector<float> table = numbers(kVocab * kHidden), ones(kHidden, 1.0f), cos(kMaxLength * kHeadSize / 2), sin(cos);
  for (float& number : table) number *= 8;
  for (size_t i = 0; i < cos.size(); ++i) {
    const double angle = static_cast<double>(i / 8) / static_cast<double>(1 + i % 8 * 3);
    cos[i] = static_cast<float>(std::cos(angle)), sin[i] = static_cast<float>(std::sin(angle));
  }
  std::vector<std::vector<char>> caches(2 * kLayers, std::vector<char>(kBlocks * kBlock * kKvHeads * (kHeadSize + 4) * 4));
  std::vector<Layer> layers;
  for (int64_t i = 0; i < kLayers; ++i) {
    const Norm norm{ones.data(), nullptr};
    layers.push_back({norm, norm, {}, {}, {}, cos.data(), sin.data(),
                      random_matrix(kind, (kHeads + 2 * kKvHeads) * kHeadSize, kHidden),
                      random_matrix(kind, kHidden, kHeads * kHeadSize), random_matrix(kind, 2 * kWide, kHidden),
                      random_matrix(kind, kHidden, kWide), nullptr, caches[2 * i].data(), caches[2 * i + 1].data(), 0,
                      nullptr});
  }
  Recurrence recurrence;
  for (Layer& layer : layers)
    layer.heads = kHeads, layer.kv_heads = kKvHeads, layer.head_size = layer.rotary_size = kHeadSize, layer.attention_scale = 0.25f;
  if (recurrent_kind) recurrence = random_recurrence(*recurrent_kind, floats), layers[0].recurrence = &recurrence;
  const Network network{kHidden, kHeads, kKvHeads, kHeadSize, kHeadSize, kBlock, kLayers, kWide, 0, kSilu, 1, cache_kind,
                        kFloat32, 0, 0, 0, layers.data(), table.data(), nullptr, {}, {ones.data(), nullptr},
                        random_matrix(kind, kVocab, kHidden), 1e-5f, 0.25f, 0, nullptr, 0, 0, 1, 1, 1, 0, nullptr, 0};
  run(network, {3, 1, 4, 1, 5, 9, 2, 6}, {0, 1, 2, 3, 4, 0, 1, 2}, {0, 5, 8});
  run(network, {5, 35}, {5, 3}, {0, 1, 2});
}

}  // namespace

int main() {
  std::printf("%s: %d\n", instructions(), self_test());
  for (const Kind kind : {kFloat32, kBfloat16, kFloat16, kInt8, kInt4, kBfloat16Pairs, kInt5, kInt6Scaled})
    for (const Kind cache_kind : {kFloat32, kBfloat16, kFloat16, kInt8}) {
      std::printf("%d %d", static_cast<int>(kind), static_cast<int>(cache_kind));
      run(kind, cache_kind);
      std::printf("\n");
    }
  for (const RecurrentKind kind : {kShortConvolution, kMamba, kMamba2, kDeltaNet}) {
    std::printf("recurrent %s", std::to_string(kind).append("th").c_str());
    run(kFloat32, kFloat32, &kind);
    std::printf("\n");
  }
}
