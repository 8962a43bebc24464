// Routers with groups: a token's experts are chosen from the best groups of experts only.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace flambeau {

// The score of a group of experts: its largest rank, or the sum of its two largest.
inline float score_of_group(const float* ranks, int64_t size, bool adds_two) {
  float first = -INFINITY, second = -INFINITY;
  for (int64_t n = 0; n < size; ++n) {
    if (ranks[n] > first)
      second = first, first = ranks[n];
    else
      second = std::max(second, ranks[n]);
  }
  return adds_two ? first + second : first;
}

// Which of the groups of experts with these ranks [count] are left, of which `num_chosen` are the best; the first of equals.
inline std::vector<bool> best_groups(const float* ranks, int64_t count, int64_t num_groups, int64_t num_chosen,
                                     bool adds_two) {
  const int64_t size = count / num_groups;
  std::vector<float> scores(num_groups);
  for (int64_t g = 0; g < num_groups; ++g) scores[g] = score_of_group(ranks + g * size, size, adds_two);
  std::vector<bool> is_chosen(num_groups);
  for (int64_t i = 0; i < std::min(num_chosen, num_groups); ++i) {
    int64_t best = -1;
    for (int64_t g = 0; g < num_groups; ++g)
      if (!is_chosen[g] && (best < 0 || scores[g] > scores[best])) best = g;
    is_chosen[best] = true;
  }
  return is_chosen;
}

}  // namespace flambeau
