// Threads that share out the pieces of a piece of work, and sleep between steps.
//
// Pieces are taken one by one, so a thread that the operating system has put aside delays nobody: the others take its
// share. (OpenMP divides the work beforehand and waits for everyone; where another process is busy on the same cores, a
// step of fifty such waits took a hundred times as long.)
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
  // Calls work(piece) for each piece from 0, on up to `num_threads` threads with the caller's among them.
  template <typename Work>
  void share(int64_t num_pieces, int num_threads, const Work& work) {
    std::unique_lock<std::mutex> mine(owner_, std::try_to_lock);
    if (num_pieces <= 1 || num_threads <= 1 || !mine.owns_lock()) {  // someone else's step has the threads
      for (int64_t piece = 0; piece < num_pieces; ++piece) work(piece);
      return;
    }
    start(num_threads - 1);
    call_ = [](const void* context, int64_t piece) { (*static_cast<const Work*>(context))(piece); };
    context_ = &work;
    num_pieces_ = num_pieces;
    next_.store(0);
    is_open_.store(true);
    rounds_.fetch_add(1);
    if (asleep_.load() > 0) {
      std::lock_guard<std::mutex> guard(sleep_);
      wake_.notify_all();
    }
    take_pieces();
    is_open_.store(false);
    for (int turn = 0; busy_.load() > 0; ++turn) turn < 2000 ? rest() : static_cast<void>(sched_yield());
  }

  // Never taken down: threads may be asleep here when the process ends.
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

  void take_pieces() {
    for (int64_t piece; (piece = next_.fetch_add(1)) < num_pieces_;) call_(context_, piece);
  }

  void serve() {
    for (uint64_t seen = 0;;) {
      for (int turn = 0; rounds_.load() == seen && turn < 2000; ++turn) rest();  // some 50 us: the next layer is near
      if (rounds_.load() == seen) {
        std::unique_lock<std::mutex> guard(sleep_);
        asleep_.fetch_add(1);
        wake_.wait(guard, [&] { return rounds_.load() != seen; });
        asleep_.fetch_sub(1);
      }
      seen = rounds_.load();
      // Says it is busy before it looks whether there is work: whoever closes the work waits for it from then on.
      busy_.fetch_add(1);
      if (is_open_.load()) take_pieces();
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
  int64_t num_pieces_ = 0;
};

}  // namespace flambeau
