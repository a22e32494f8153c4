#include "races.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "streams.h"

namespace software_npu {
namespace {

struct Freed {
  std::string by;
  Clock uses;
};
struct Sent {
  const char* data;
  std::string bytes;  // what the copy must find
  c10::Stream stream;
  int64_t time;
  std::thread::id by;
};
// Never destroyed: tensors may be freed when the process ends.
struct State {
  std::mutex lock;
  std::unordered_map<c10::Stream, Clock> clocks;
  std::unordered_map<c10::Stream, std::vector<Freed>> pools;  // what each stream could give out
  std::vector<Sent> sent;  // pinned memory that a stream may still have to read
};
State& state() {
  static State* const made = new State;
  return *made;
}

thread_local Clock host;  // what this thread has waited for

void join(Clock& to, const Clock& from) {
  for (const auto& [stream, time] : from) {
    int64_t& known = to[stream];
    known = std::max(known, time);
  }
}

// With the lock: whether `stream` comes after a call of `other`.
bool knows(c10::Stream stream, c10::Stream other, int64_t time) {
  if (stream == other || !time) return true;
  const auto has = [&](const Clock& clock) {
    const auto found = clock.find(other);
    return found != clock.end() && found->second >= time;
  };
  return has(state().clocks[stream]) || has(host);
}

template <typename Which>
void erase_if(std::vector<Sent>& from, const Which& which) {
  from.erase(std::remove_if(from.begin(), from.end(), which), from.end());
}

std::string name_of(c10::Stream stream) {
  return stream.id() ? "stream " + std::to_string(stream.id()) : "the default stream";
}

}  // namespace

bool races_refused() {
  static const bool wanted = [] {
    const char* value = std::getenv("SOFTWARE_NPU_RACES");
    return value && *value == '1';
  }();
  return wanted;
}

std::unique_ptr<Trace> new_trace(int device) {
  if (!races_refused()) return nullptr;
  const c10::Stream stream = current_stream(device);
  if (!capture_of(device)) {
    State& now = state();
    std::lock_guard<std::mutex> guard(now.lock);
    for (const Freed& block : std::exchange(now.pools[stream], {})) {
      for (const auto& [other, time] : block.uses) {
        TORCH_CHECK(knows(stream, other, time), "a race: ", name_of(stream), " allocates while ", name_of(other),
                    " may still use memory of ", name_of(stream), " that was freed (", block.by,
                    " wrote it), which the allocator gives out again. Call record_stream() on that tensor, or let ",
                    name_of(stream), " wait for ", name_of(other));
      }
    }
  }
  return std::make_unique<Trace>(Trace{stream, stream});
}

void freed(std::unique_ptr<Trace> trace) {
  if (!trace) return;
  State& now = state();
  std::lock_guard<std::mutex> guard(now.lock);
  Freed block{trace->by, {}};
  for (const auto& [other, time] : trace->uses) {
    if (!trace->recorded.count(other) && !knows(trace->made, other, time)) block.uses[other] = time;
  }
  if (!block.uses.empty()) now.pools[trace->made].push_back(std::move(block));
}

void record_use(Trace* trace, c10::Stream stream) {
  if (!trace) return;
  std::lock_guard<std::mutex> guard(state().lock);
  trace->recorded.insert(stream);
}

void touch(Trace* trace, c10::Stream stream, bool writes, const std::string& name) {
  if (!trace) return;
  State& now = state();
  std::lock_guard<std::mutex> guard(now.lock);
  TORCH_CHECK(knows(stream, trace->writer, trace->written), "a race: ", name, " on ", name_of(stream),
              " uses what ", trace->by, " writes on ", name_of(trace->writer), ", and does not wait for it");
  const int64_t time = now.clocks[stream][stream] + 1;
  if (writes) {
    for (const auto& [other, used] : trace->uses) {
      TORCH_CHECK(knows(stream, other, used), "a race: ", name, " on ", name_of(stream), " writes what ",
                  name_of(other), " uses, and does not wait for it");
    }
    trace->writer = stream;
    trace->written = time;
    trace->by = name;
  }
  trace->uses[stream] = time;
}

void called(c10::Stream stream) {
  State& now = state();
  std::lock_guard<std::mutex> guard(now.lock);
  ++now.clocks[stream][stream];
}

Clock clock_of(c10::Stream stream) {
  if (!races_refused()) return {};
  State& now = state();
  std::lock_guard<std::mutex> guard(now.lock);
  return now.clocks[stream];
}

void wait_for_clock(c10::Stream stream, const Clock& clock) {
  if (!races_refused()) return;
  State& now = state();
  std::lock_guard<std::mutex> guard(now.lock);
  join(now.clocks[stream], clock);
}

void sent(const void* data, size_t bytes, c10::Stream stream) {
  State& now = state();
  std::lock_guard<std::mutex> guard(now.lock);
  const char* first = static_cast<const char*>(data);
  now.sent.push_back({first, {first, bytes}, stream, now.clocks[stream][stream], std::this_thread::get_id()});
}

void no_longer_sent(const void* data, size_t bytes) {
  State& now = state();
  std::lock_guard<std::mutex> guard(now.lock);
  const char* first = static_cast<const char*>(data);
  erase_if(now.sent, [&](const Sent& one) { return one.data >= first && one.data < first + bytes; });
}

Clock host_clock() { return host; }

void host_waits(const Clock& clock) {
  if (!races_refused()) return;
  State& now = state();
  std::lock_guard<std::mutex> guard(now.lock);
  join(host, clock);
  bool changed = false;
  erase_if(now.sent, [&](const Sent& one) {
    if (one.by != std::this_thread::get_id()) return false;
    const auto found = host.find(one.stream);
    const bool ended = found != host.end() && found->second >= one.time;
    changed |= ended && std::memcmp(one.data, one.bytes.data(), one.bytes.size());
    return ended;
  });
  TORCH_CHECK(!changed, "a race: the host has written pinned memory while a copy to the device may still read it: ",
              "wait for the copy first");
}

void host_waits_for_all() {
  if (!races_refused()) return;
  Clock all;
  {
    State& now = state();
    std::lock_guard<std::mutex> guard(now.lock);
    for (const auto& [stream, clock] : now.clocks) join(all, clock);
  }
  host_waits(all);
}

}  // namespace software_npu
