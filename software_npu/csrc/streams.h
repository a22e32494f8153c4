// Streams and events. An operator runs to its end when it is called, so a stream is always done, except while a
// graph that is replayed on it waits for an external event (graphs.h): then whatever else would have to wait behind
// it is refused, for it cannot be put off here.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <functional>

#include "races.h"

namespace software_npu {

class Graph;
struct ExternalEvent;

struct StreamState {
  Graph* capture = nullptr;          // the graph that records what is called on this stream
  ExternalEvent* waits_for = nullptr;
  Graph* replays = nullptr;          // the graph that waits
  std::function<void()> rest;        // what continues when that event is recorded
};

c10::Stream current_stream(int device);
c10::Stream set_current_stream(c10::Stream stream);  // returns the one before
c10::Stream new_stream(int device);

// The state of a stream if it has one; most have none.
StreamState* find_state(c10::Stream stream);
StreamState& make_state(c10::Stream stream);
bool is_captured(const Graph* graph);
void drop_captures(const Graph* graph);
void drop_replays(const Graph* graph);
void wake_streams(ExternalEvent* event);

// The graph that records this thread's calls on a device; refuses a stream that waits.
Graph* capture_of(int device);
// For what waits for the device: refused while captured, and where it would hang.
void check_may_wait(const char* what);
void check_may_wait(const char* what, c10::Stream stream);

struct Event {
  std::chrono::steady_clock::time_point time;
  Graph* capture = nullptr;
  int device = -1;
  Clock clock;
};

}  // namespace software_npu
