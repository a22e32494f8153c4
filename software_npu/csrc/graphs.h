// Graphs: the calls of a capture, with their arguments, done again by every replay.
//
// A captured operator also runs immediately, so that its result has a shape; a device does not run it. Results keep
// their memory as long as the graph lives. Numbers among the arguments stay what they were, unless the calls
// belong to a task group that is updated.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "streams.h"

namespace software_npu {

using Stack = std::vector<c10::IValue>;

// Set by any stream, waited for within a graph, reset there: how the host feeds a graph that runs.
struct ExternalEvent {
  bool recorded = false;
  void record(c10::Stream stream);
  ~ExternalEvent();
};
// On a stream that is captured these become steps of the graph.
void wait_for(const std::shared_ptr<ExternalEvent>& event, c10::Stream stream);
void reset(const std::shared_ptr<ExternalEvent>& event, c10::Stream stream);

struct Step {
  virtual ~Step() = default;
  virtual bool run() = 0;  // false: it must wait, and the graph with it
  virtual std::string name() const = 0;
};

class Graph : public std::enable_shared_from_this<Graph> {
 public:
  ~Graph();
  void begin(c10::Stream stream);
  void end();
  void replay();
  void reset();
  size_t size() const { return steps_.size(); }
  std::vector<std::string> names() const;

  void add_call(const c10::OperatorHandle& op, const Stack& inputs, const Stack& outputs);
  void add_action(std::string name, std::function<void()> action);
  void add_wait(std::shared_ptr<ExternalEvent> event);

 private:
  friend bool update_call(const c10::OperatorHandle& op, Stack* stack);
  void run_from(size_t first, c10::Stream stream);

  std::vector<std::unique_ptr<Step>> steps_;
  std::optional<c10::Stream> stream_;
  bool capturing_ = false, ready_ = false;
};

// The calls between graph_task_group_begin and _end, whose arguments an update replaces one after the other.
struct TaskGroup {
  std::shared_ptr<Graph> graph;
  size_t first = 0, last = 0;
};
void begin_group(c10::Stream stream);
TaskGroup end_group(c10::Stream stream);
void begin_update(c10::Stream stream, const TaskGroup& group);
void end_update(c10::Stream stream);
// While a group is updated, the call replaces the group's next one and the outputs of that are on the stack.
bool update_call(const c10::OperatorHandle& op, Stack* stack);

struct GraphCounts {
  int64_t captures = 0, replays = 0, steps = 0, updates = 0;
};
GraphCounts& graph_counts();

}  // namespace software_npu
