// A checksum of what leaves, to be compared when it comes back.
#pragma once
#include <cstdint>
#include <cstring>

namespace lowtide {

// 64 bits in four independent lanes; each step is invertible, so any single changed word changes it.
inline uint64_t checksum_of(const char* data, int64_t bytes) {
  constexpr uint64_t kMul = 0x9E3779B97F4A7C15ull;
  uint64_t lane[4] = {1, 2, 3, 4};
  int64_t i = 0;
  for (; i + 32 <= bytes; i += 32)
    for (int k = 0; k < 4; ++k) {
      uint64_t word;
      std::memcpy(&word, data + i + 8 * k, 8);
      lane[k] = (lane[k] ^ word) * kMul;
      lane[k] ^= lane[k] >> 29;
    }
  uint64_t sum = static_cast<uint64_t>(bytes);
  for (; i < bytes; ++i) sum = (sum ^ static_cast<unsigned char>(data[i])) * kMul;
  for (uint64_t l : lane) sum = ((sum ^ l) * kMul) ^ (sum >> 31);
  return sum;
}

}  // namespace lowtide
