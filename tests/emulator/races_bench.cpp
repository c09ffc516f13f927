// Accesses as a training makes them, timed without the cost of calling from Python: see test_races_limits.py.
#include <ctime>
#include <vector>

#include "races.h"

using namespace lowtide;

static double cpu_s() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// `jobs` jobs with three operands each on five streams, one block of eight freed and allocated again after each, and
// every fourth job with an event that another stream waits for. Returns the CPU seconds of this thread.
extern "C" double bench_training(int64_t jobs) {
  std::vector<races::Agent> streams;
  for (int i = 0; i < 5; i++) streams.push_back(races::stream(0, i));
  constexpr uintptr_t kBase = uintptr_t{1} << 32, kBlock = 1 << 20;
  constexpr int64_t kBlocks = 800;
  const auto block = [](int64_t i) { return reinterpret_cast<const void*>(kBase + i * kBlock); };
  uint64_t random = 1;
  const auto draw = [&](int64_t n) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<int64_t>((random >> 33) % static_cast<uint64_t>(n));
  };
  const double start = cpu_s();
  for (int64_t i = 0; i < jobs; i++) {
    const auto s = streams[draw(5)];
    const int64_t a = draw(kBlocks), b = draw(kBlocks), c = draw(kBlocks);
    races::submit(s, "aten::addmm",
                  {{block(a), kBlock, false}, {block(b), kBlock / 2, false}, {block(c), kBlock, true}});
    if (i % 4 == 0) races::wait(streams[draw(5)], races::record(s));
    if (i % 8 == 0) {
      races::free(block(c), kBlock, s, {streams[0]});
      races::alloc(block(c), kBlock, s, races::Reuse::kCompleted);
    }
  }
  return cpu_s() - start;
}

// The cost of a call while the detector is off, in CPU seconds.
extern "C" double bench_disabled(int64_t jobs) {
  const auto s = races::stream(0, 0);
  const double start = cpu_s();
  for (int64_t i = 0; i < jobs; i++) races::submit(s, "aten::addmm", {{&s, sizeof s, false}});
  return cpu_s() - start;
}
