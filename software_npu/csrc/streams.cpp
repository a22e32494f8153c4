#include "streams.h"

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "driver.h"
#include "memory.h"

namespace software_npu {
namespace {

std::atomic<int64_t> streams_made{0};
std::mutex states_lock;
std::unordered_map<c10::Stream, StreamState> states;
std::atomic<bool> any_state{false};
thread_local int64_t current_ids[kMostDevices];  // 0: the default stream

}  // namespace

c10::Stream current_stream(int device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNPU, static_cast<c10::DeviceIndex>(device)),
                     current_ids[device]);
}

c10::Stream set_current_stream(c10::Stream stream) {
  const c10::Stream before = current_stream(stream.device_index());
  current_ids[stream.device_index()] = stream.id();
  return before;
}

c10::Stream new_stream(int device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNPU, static_cast<c10::DeviceIndex>(device)),
                     ++streams_made);
}

StreamState* find_state(c10::Stream stream) {
  if (!any_state) return nullptr;
  std::lock_guard<std::mutex> guard(states_lock);
  auto found = states.find(stream);
  return found == states.end() ? nullptr : &found->second;
}

StreamState& make_state(c10::Stream stream) {
  std::lock_guard<std::mutex> guard(states_lock);
  any_state = true;
  return states[stream];
}

bool is_captured(const Graph* graph) {
  std::lock_guard<std::mutex> guard(states_lock);
  for (auto& [stream, state] : states) {
    if (graph && state.capture == graph) return true;
  }
  return false;
}

void drop_replays(const Graph* graph) {
  std::lock_guard<std::mutex> guard(states_lock);
  for (auto& [stream, state] : states) {
    if (state.replays == graph) state = StreamState{state.capture};
  }
}

void drop_captures(const Graph* graph) {
  std::lock_guard<std::mutex> guard(states_lock);
  for (auto& [stream, state] : states) {
    if (state.capture == graph) state.capture = nullptr;
  }
}

void wake_streams(ExternalEvent* event) {
  std::vector<std::function<void()>> ready;
  {
    std::lock_guard<std::mutex> guard(states_lock);
    for (auto& [stream, state] : states) {
      if (state.waits_for != event) continue;
      state.waits_for = nullptr;
      state.replays = nullptr;
      ready.push_back(std::move(state.rest));
    }
  }
  for (auto& rest : ready) {
    if (rest) rest();
  }
}

Graph* capture_of(int device) {
  StreamState* state = find_state(current_stream(device));
  if (!state) return nullptr;
  TORCH_CHECK(!state->waits_for, "stream ", current_stream(device).id(), " of npu:", device,
              " waits for an ExternalEvent that nobody has recorded yet. A device would put this call off until "
              "then; this one runs calls immediately, so record the event first");
  return state->capture;
}

void check_may_wait(const char* what, c10::Stream stream) {
  StreamState* state = find_state(stream);
  if (!state) return;
  TORCH_CHECK(!state->capture, what, " waits for the device: not permitted while a graph is captured");
  TORCH_CHECK(!state->waits_for, what, " would never return: stream ", stream.id(),
              " waits for an ExternalEvent that nobody has recorded");
}

void check_may_wait(const char* what) {
  if (!any_state) return;
  std::vector<c10::Stream> all;
  {
    std::lock_guard<std::mutex> guard(states_lock);
    for (auto& entry : states) all.push_back(entry.first);
  }
  for (c10::Stream stream : all) check_may_wait(what, stream);
}

}  // namespace software_npu
