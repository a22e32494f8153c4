#include "graphs.h"

#include "fallback.h"
#include "memory.h"

namespace software_npu {
namespace {

// Tensors of a stack, replaced by others over the same memory.
Stack pinned_down(const Stack& values) {
  Stack copies;
  for (const c10::IValue& value : values) {
    if (value.isTensor() && is_npu(value.toTensor())) {
      copies.emplace_back(same_memory(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(is_npu(tensor) ? same_memory(tensor) : tensor);
      copies.emplace_back(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        list.push_back(tensor && is_npu(*tensor) ? std::optional<at::Tensor>(same_memory(*tensor)) : tensor);
      }
      copies.emplace_back(std::move(list));
    } else {
      copies.push_back(value);
    }
  }
  return copies;
}

void put(const at::Tensor& to, const at::Tensor& from) {
  if (is_npu(to) && to.storage().data() != from.storage().data()) as_cpu(to).copy_(as_cpu(from));
}

struct Call final : Step {
  Call(const c10::OperatorHandle& which, Stack in, Stack out)
      : op(which), inputs(std::move(in)), outputs(std::move(out)) {}

  bool run() override {
    Stack stack = inputs;
    run_on_host(op, &stack);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].isTensor()) {
        put(outputs[i].toTensor(), stack[i].toTensor());
      } else if (outputs[i].isTensorList()) {
        const auto to = outputs[i].toTensorList(), from = stack[i].toTensorList();
        for (size_t k = 0; k < to.size(); ++k) put(to.get(k), from.get(k));
      }
    }
    return true;
  }
  std::string name() const override { return op.operator_name().name; }

  c10::OperatorHandle op;
  Stack inputs, outputs;
};

struct Action final : Step {
  Action(std::string what, std::function<void()> how) : called(std::move(what)), action(std::move(how)) {}
  bool run() override {
    action();
    return true;
  }
  std::string name() const override { return called; }

  std::string called;
  std::function<void()> action;
};

struct Wait final : Step {
  explicit Wait(std::shared_ptr<ExternalEvent> awaited) : event(std::move(awaited)) {}
  bool run() override { return event->recorded; }
  std::string name() const override { return "wait"; }

  std::shared_ptr<ExternalEvent> event;
};

Graph* capture_on(c10::Stream stream) {
  StreamState* state = find_state(stream);
  return state ? state->capture : nullptr;
}

struct Update {
  TaskGroup group;
  size_t next;
};
thread_local std::optional<size_t> group_first;
thread_local std::optional<Update> update;

}  // namespace

GraphCounts& graph_counts() {
  static GraphCounts counts;
  return counts;
}

// ---- events that the host records

void ExternalEvent::record(c10::Stream stream) {
  TORCH_CHECK(!capture_on(stream), "an ExternalEvent is recorded outside of graphs");
  recorded = true;
  wake_streams(this);
}

ExternalEvent::~ExternalEvent() { wake_streams(this); }

void wait_for(const std::shared_ptr<ExternalEvent>& event, c10::Stream stream) {
  if (Graph* graph = capture_on(stream)) {
    graph->add_wait(event);
  } else if (!event->recorded) {
    make_state(stream).waits_for = event.get();
  }
}

void reset(const std::shared_ptr<ExternalEvent>& event, c10::Stream stream) {
  if (Graph* graph = capture_on(stream)) {
    graph->add_action("reset", [event] { event->recorded = false; });
  } else {
    event->recorded = false;
  }
}

// ---- capture and replay

Graph::~Graph() {
  drop_captures(this);
  drop_replays(this);
}

void Graph::begin(c10::Stream stream) {
  TORCH_CHECK(!capturing_ && !ready_, "this graph has been captured: reset() it before it captures again");
  TORCH_CHECK(!capture_on(stream), "a graph is captured on this stream already");
  make_state(stream).capture = this;
  stream_ = stream;
  capturing_ = true;
}

void Graph::end() {
  TORCH_CHECK(capturing_, "capture_end() without capture_begin()");
  drop_captures(this);
  capturing_ = false;
  ready_ = true;
  ++graph_counts().captures;
}

void Graph::reset() {
  drop_captures(this);
  drop_replays(this);
  steps_.clear();
  capturing_ = ready_ = false;
}

void Graph::replay() {
  TORCH_CHECK(ready_, "replay() of a graph that has not been captured");
  const c10::Stream stream = current_stream(stream_->device_index());
  TORCH_CHECK(!capture_of(stream.device_index()), "replay() while a graph is captured");
  ++graph_counts().replays;
  run_from(0, stream);
}

void Graph::run_from(size_t first, c10::Stream stream) {
  for (size_t i = first; i < steps_.size(); ++i) {
    if (!steps_[i]->run()) {
      StreamState& state = make_state(stream);
      state.waits_for = static_cast<Wait&>(*steps_[i]).event.get();
      state.replays = this;
      state.rest = [this, i, stream] { run_from(i, stream); };
      return;
    }
    ++graph_counts().steps;
  }
}

std::vector<std::string> Graph::names() const {
  std::vector<std::string> all;
  for (auto& step : steps_) all.push_back(step->name());
  return all;
}

void Graph::add_call(const c10::OperatorHandle& op, const Stack& inputs, const Stack& outputs) {
  steps_.push_back(std::make_unique<Call>(op, pinned_down(inputs), pinned_down(outputs)));
}

void Graph::add_action(std::string name, std::function<void()> action) {
  steps_.push_back(std::make_unique<Action>(std::move(name), std::move(action)));
}

void Graph::add_wait(std::shared_ptr<ExternalEvent> event) {
  steps_.push_back(std::make_unique<Wait>(std::move(event)));
}

// ---- task groups

void begin_group(c10::Stream stream) {
  Graph* graph = capture_on(stream);
  TORCH_CHECK(graph, "graph_task_group_begin: no graph is captured on this stream");
  TORCH_CHECK(!group_first, "graph_task_group_begin: a group is open already");
  group_first = graph->size();
}

TaskGroup end_group(c10::Stream stream) {
  Graph* graph = capture_on(stream);
  TORCH_CHECK(graph && group_first, "graph_task_group_end without graph_task_group_begin");
  const TaskGroup group{graph->shared_from_this(), *group_first, graph->size()};
  group_first.reset();
  return group;
}

void begin_update(c10::Stream stream, const TaskGroup& group) {
  TORCH_CHECK(!update, "graph_task_update_begin: an update is open already");
  TORCH_CHECK(!capture_on(stream), "graph_task_update_begin while a graph is captured");
  TORCH_CHECK(group.graph && group.last <= group.graph->size(), "graph_task_update_begin: no such task group");
  update = Update{group, group.first};
}

void end_update(c10::Stream) {
  TORCH_CHECK(update, "graph_task_update_end without graph_task_update_begin");
  const Update done = *update;
  update.reset();
  TORCH_CHECK(done.next == done.group.last, "graph_task_update_end: ", done.next - done.group.first, " of ",
              done.group.last - done.group.first, " calls of the group were updated");
  ++graph_counts().updates;
}

bool update_call(const c10::OperatorHandle& op, Stack* stack) {
  if (!update) return false;
  TORCH_CHECK(update->next < update->group.last, op.operator_name().name, ": the task group has fewer calls");
  auto* call = dynamic_cast<Call*>(update->group.graph->steps_[update->next].get());
  TORCH_CHECK(call && call->op.operator_name() == op.operator_name(), "the task group has ",
              update->group.graph->steps_[update->next]->name(), " where it is updated with ",
              op.operator_name().name);
  ++update->next;
  const size_t count = op.schema().arguments().size();
  call->inputs = pinned_down(Stack(stack->end() - count, stack->end()));
  stack->resize(stack->size() - count);
  stack->insert(stack->end(), call->outputs.begin(), call->outputs.end());
  return true;
}

}  // namespace software_npu
