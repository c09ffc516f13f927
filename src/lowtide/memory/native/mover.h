// A mover's thread.
//
// A limit on a process's data (RLIMIT_DATA, ulimit -d) counts a stack whole, used or not: with the usual 8 MiB each, movers
// would take from a limited process more than many a budget. They call into no code of the program's and need little.
#pragma once
#include <pthread.h>

#include <functional>
#include <memory>
#include <system_error>

namespace lowtide {

class Mover {
 public:
  static constexpr size_t kStack = 512 << 10;

  explicit Mover(std::function<void()> work) {
    auto owned = std::make_unique<std::function<void()>>(std::move(work));
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStack);
    int error = pthread_create(&thread_, &attributes, run, owned.get());
    pthread_attr_destroy(&attributes);
    if (error) throw std::system_error(error, std::generic_category(), "lowtide: a thread that moves pages");
    owned.release();
  }

  void join() const {
    pthread_join(thread_, nullptr);
  }

  void detach() const {
    pthread_detach(thread_);
  }

 private:
  static void* run(void* work) {
    std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(work));
    (*owned)();
    return nullptr;
  }

  pthread_t thread_;
};

}  // namespace lowtide
