#include "engine.h"

#include <algorithm>
#include <thread>

namespace lowtide::sim {

void Engine::copy(char* to, const char* from, size_t n, StreamId stream) {
  constexpr double kChunkS = 5e-4;
  Lock lock(mutex_);
  auto start = activity_.begin(kind_);
  double rate = bytes_per_s, latency_s = knobs().latency_s;
  // In chunks, because bytes arrive on a link little by little: who reads too early finds a part of them.
  size_t chunk = rate > 0 ? std::clamp(static_cast<size_t>(rate * kChunkS), size_t(64) << 10, size_t(4) << 20) : n;
  if (rate <= 0 && latency_s > 0) std::this_thread::sleep_until(start + seconds(latency_s));
  for (size_t done = 0; done < n;) {
    size_t part = std::min(chunk, n - done);
    std::memcpy(to + done, from + done, part);
    done += part;
    if (rate > 0) std::this_thread::sleep_until(start + seconds(latency_s + static_cast<double>(done) / rate));
  }
  auto end = activity_.end(kind_, static_cast<int64_t>(n));
  static const std::string names[] = {"", "copy h2d", "copy d2h"};
  trace().add(kind_, device_, stream, start, end, static_cast<int64_t>(n), names[static_cast<int>(kind_)]);
}

}  // namespace lowtide::sim
