// A thread pool that divides work into tasks and sleeps between steps.
//
// Threads take tasks one by one, so a thread that the operating system has suspended delays nothing: the others take
// its share. OpenMP divides the work beforehand and waits for every thread; with another process busy on the same
// cores, a step with fifty such waits took a hundred times as long.
#pragma once
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace flambeau {

class Threads {
 public:
  // Calls work(task) for each task from 0, on up to `num_threads` threads including the caller's.
  template <typename Work>
  void share(int64_t num_tasks, int num_threads, const Work& work) {
    const bool is_divided = num_tasks > 1 && num_threads > 1;
    std::unique_lock<std::mutex> mine(owner_, std::defer_lock);
    if (!is_divided || !mine.try_lock()) {  // a step on another thread uses the pool
      for (int64_t task = 0; task < num_tasks; ++task) work(task);
      return;
    }
    start(num_threads - 1);
    call_ = [](const void* context, int64_t task) { (*static_cast<const Work*>(context))(task); };
    context_ = &work;
    num_tasks_ = num_tasks;
    next_.store(0);
    is_open_.store(true);
    rounds_.fetch_add(1);
    if (asleep_.load() > 0) {
      std::lock_guard<std::mutex> guard(sleep_);
      wake_.notify_all();
    }
    take_tasks();
    is_open_.store(false);
    for (int turn = 0; busy_.load() > 0; ++turn) turn < 2000 ? rest() : static_cast<void>(sched_yield());
  }

  // Never destroyed: its threads may sleep here when the process exits.
  static Threads& of_process() {
    static Threads* threads = new Threads;
    return *threads;
  }

 private:
  static void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }

  void start(int count) {
    while (static_cast<int>(members_.size()) < count) members_.emplace_back([this] { serve(); }).detach();
  }

  void take_tasks() {
    for (int64_t task; (task = next_.fetch_add(1)) < num_tasks_;) call_(context_, task);
  }

  void serve() {
    for (uint64_t seen = 0;;) {
      for (int turn = 0; rounds_.load() == seen && turn < 2000; ++turn) rest();  // about 50 us: the next layer follows soon
      if (rounds_.load() == seen) {
        std::unique_lock<std::mutex> guard(sleep_);
        asleep_.fetch_add(1);
        wake_.wait(guard, [&] { return rounds_.load() != seen; });
        asleep_.fetch_sub(1);
      }
      seen = rounds_.load();
      // Marked busy before it checks for work: from then on, the thread that closes the work waits for it.
      busy_.fetch_add(1);
      if (is_open_.load()) take_tasks();
      busy_.fetch_sub(1);
    }
  }

  std::mutex owner_, sleep_;
  std::condition_variable wake_;
  std::vector<std::thread> members_;
  std::atomic<uint64_t> rounds_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> busy_{0}, asleep_{0};
  std::atomic<bool> is_open_{false};
  void (*call_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  int64_t num_tasks_ = 0;
};

}  // namespace flambeau
