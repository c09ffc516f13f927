#include "streams.h"

#include <ATen/Parallel.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <random>
#include <thread>

namespace lowtide::sim {

void Moment::reach() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    at = Clock::now();
    done = true;
  }
  reached_.notify_all();
}

void Moment::wait() {
  if (done) return;
  WithoutGil released;
  Lock lock(mutex_);
  reached_.wait(lock, [&] { return done.load(); });
}

void Stream::name(int device, StreamId id) {
  device_ = device;
  id_ = id;
  agent_ = races::stream(device, id);
}

void Stream::start() {
  if (started_) return;
  started_ = true;
  std::thread([this] { run(); }).detach();
}

void Stream::wait_for_room(Lock& lock) {
  auto has_room = [this] { return queued_ - finished_ < static_cast<uint64_t>(knobs().queue_depth.load()); };
  if (has_room()) return;
  lock.unlock();
  {
    // The GIL goes before the lock and comes back after it: whoever runs a job may need the one or the other.
    WithoutGil released;
    Lock inner(mutex_);
    finished_one_.wait(inner, has_room);
  }
  lock.lock();
}

void Stream::run() {
  is_worker = true;
  prctl(PR_SET_TIMERSLACK, 1000UL);  // a paced copy sleeps in steps of half a millisecond; the default slack is 50 us
  prctl(PR_SET_NAME, "sim-stream");
  uint64_t seed = ~knobs().seed.load();
  std::minstd_rand random;
  for (;;) {
    std::function<void()> job;
    {
      Lock lock(mutex_);
      has_job_.wait(lock, [&] { return !jobs_.empty() && !own_; });
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    if (double longest_s = knobs().jitter_s; longest_s > 0) {
      if (uint64_t wanted = knobs().seed; wanted != seed) {
        seed = wanted;
        random.seed(static_cast<uint32_t>(seed * 1000003 + device_ * 101 + id_ + 1));
      }
      // A third of the jobs start at once: an order is broken as easily by a job that is early as by one that is late.
      double share = random() % 3 == 0 ? 0.0 : static_cast<double>(random() % 1000) / 1000;
      if (share > 0) std::this_thread::sleep_for(seconds(longest_s * share));
    }
    job();
    job = nullptr;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      ++finished_;
    }
    finished_one_.notify_all();
  }
}

void Stream::begin_own() {
  WithoutGil released;
  Lock lock(mutex_);
  finished_one_.wait(lock, [&] { return idle(); });
  own_ = true;
  ++queued_;
}

void Stream::end_own() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    own_ = false;
    ++finished_;
  }
  has_job_.notify_one();
  finished_one_.notify_all();
}

void Stream::wait_until(uint64_t jobs) {
  if (finished_.load() >= jobs) return;
  WithoutGil released;
  Lock lock(mutex_);
  finished_one_.wait(lock, [&] { return finished_.load() >= jobs; });
}

MomentPtr Stream::record() {
  auto moment = std::make_shared<Moment>();
  auto announce = [&] { moment->stamp = races::record(agent_); };
  if (idle()) {
    this->announce(announce);
    moment->reach();
  } else {
    push([moment] { moment->reach(); }, announce);
  }
  return moment;
}

void Stream::wait(const MomentPtr& moment) {
  auto announce = [&] { races::wait(agent_, moment->stamp); };
  if (moment->done) {
    this->announce(announce);
  } else {
    push([moment] { moment->wait(); }, announce);
  }
}

namespace {
std::atomic<int> program_threads{0};
thread_local int followed_threads = 0;
}  // namespace

void follow_thread_count() {
  // at::set_num_threads counts for the calling thread and for threads that start later. A worker that started earlier
  // would go on with the old number, and sums over another number of parts have other last bits.
  static thread_local const bool is_main = syscall(SYS_gettid) == getpid();
  if (is_main) {
    program_threads.store(at::get_num_threads(), std::memory_order_relaxed);
    return;
  }
  int wanted = program_threads.load(std::memory_order_relaxed);
  if (wanted == 0 || wanted == followed_threads) return;
  followed_threads = wanted;
  if (at::get_num_threads() != wanted) at::set_num_threads(wanted);
}

}  // namespace lowtide::sim
