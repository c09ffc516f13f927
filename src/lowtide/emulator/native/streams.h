// Streams: a queue of jobs and the thread that runs them, in order. Events: one state for each record.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "races.h"
#include "state.h"

namespace lowtide::sim {

// One record of an event. Recording the event again makes another one, so earlier waits keep their meaning.
struct Moment {
  std::atomic<bool> done{false};
  Clock::time_point at;
  races::Stamp stamp;
  void reach();
  void wait();

 private:
  std::mutex mutex_;
  std::condition_variable reached_;
};
using MomentPtr = std::shared_ptr<Moment>;
struct Event {
  MomentPtr latest;
};

// Note [Jobs of the host's own]
// Some jobs run on the host's thread in the name of a stream: the first call of an operator, a blocking copy. Such a job has its
// place in the queue like any other: it begins when what was queued before is done, and what others queue behind it waits.
class Stream {
 public:
  void name(int device, StreamId id);
  // A job of the host's own: see the note. It must end on the thread that began it.
  void begin_own();
  void end_own();
  // Queue a job. `announce` tells the race detector, under the lock that orders the queue.
  template <class Announce>
  void push(std::function<void()> job, Announce announce, bool bounded = false) {
    Lock lock(mutex_);
    start();
    if (bounded) wait_for_room(lock);
    if (races::enabled()) announce();
    jobs_.push_back(std::move(job));
    ++queued_;
    lock.unlock();
    has_job_.notify_one();
  }
  // The same for a job of the host's own.
  template <class Announce>
  void announce(Announce announce) {
    if (!races::enabled()) return;
    std::lock_guard<std::mutex> guard(mutex_);
    announce();
  }
  MomentPtr record();
  void wait(const MomentPtr& moment);

  bool idle() const { return queued_.load() == finished_.load(); }
  uint64_t queued() const { return queued_.load(); }
  uint64_t finished() const { return finished_.load(); }
  void wait_until(uint64_t jobs);
  void drain() { wait_until(queued_.load()); }
  races::Agent agent() const { return agent_; }
  StreamId id() const { return id_; }

 private:
  void start();
  void wait_for_room(Lock& lock);
  void run();

  std::mutex mutex_;
  std::condition_variable has_job_, finished_one_;
  std::deque<std::function<void()>> jobs_;
  std::atomic<uint64_t> queued_{0}, finished_{0};
  bool started_ = false, own_ = false;
  int device_ = 0;
  StreamId id_ = 0;
  races::Agent agent_ = 0;
};

// Workers of streams and of autograd compute with as many threads as the program's main thread does.
void follow_thread_count();

}  // namespace lowtide::sim
