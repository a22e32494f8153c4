// The module software_npu._C: what torch_npu/ in ../site builds torch.npu from.
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "driver.h"
#include "fallback.h"
#include "graphs.h"
#include "hccl.h"
#include "memory.h"
#include "streams.h"

namespace npu = software_npu;
namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  npu::register_device();

  m.attr("MOST_DEVICES") = kMostDevices;
  m.def("device_count", &snpu_device_count);
  m.def("current_device", &npu::current_device);
  m.def("set_device", &npu::set_current_device);

  m.def("memory_figures", &npu::memory_figures);
  m.def("total_bytes", &snpu_total_bytes);
  m.def("used_bytes", &snpu_used_bytes);
  m.def("peak_bytes", &snpu_peak_bytes);
  m.def("die_peak_bytes", &snpu_die_peak_bytes);
  m.def("die", &snpu_die);
  m.def("woken", &snpu_woken);
  m.def("collective_counts", &npu::collective_counts);
  m.def("without_memory", [](uintptr_t address) { return snpu_without_memory(reinterpret_cast<void*>(address)); });
  m.def("reset_peaks", &npu::reset_peaks);
  m.def("empty_cache", &npu::empty_cache);
  m.def("set_memory_fraction", &npu::set_memory_fraction);
  py::class_<npu::PluggedAllocator, std::shared_ptr<npu::PluggedAllocator>>(m, "PluggedAllocator")
      .def(py::init<const std::string&, const std::string&, const std::string&>());
  m.def("use_allocator", &npu::use_allocator, py::arg("allocator").none(true));

  m.def("share_memory", &npu::share_memory);
  m.def("shared_memory", &npu::shared_memory);

  m.def("as_cpu", &npu::as_cpu);
  m.def("as_npu", &npu::as_npu);
  m.def("runs_for_device", &npu::runs_for_device);
  m.def("count_calls", &npu::count_calls);
  m.def("counted_calls", &npu::counted_calls);
  m.def("default_generator", &npu::default_generator);

  m.def("current_stream", &npu::current_stream);
  m.def("set_stream", &npu::set_current_stream);
  m.def("synchronize", [] {
    npu::check_may_wait("synchronize()");
    npu::host_waits_for_all();
  });
  struct HostClock {
    npu::Clock clock;
  };
  py::class_<HostClock>(m, "HostClock");
  m.def("elapsed_ms", [](uintptr_t begin, uintptr_t end) {
    const auto time = reinterpret_cast<npu::Event*>(end)->time - reinterpret_cast<npu::Event*>(begin)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  });
  m.def("races_refused", &npu::races_refused);
  m.def("host_clock", [] { return HostClock{npu::host_clock()}; });
  m.def("host_waits", [](const HostClock& other) { npu::host_waits(other.clock); });
  m.def("is_capturing", [] {
    const auto* state = npu::find_state(npu::current_stream(npu::current_device()));
    return state && state->capture;
  });

  py::class_<npu::Graph, std::shared_ptr<npu::Graph>>(m, "Graph")
      .def(py::init<>())
      .def("begin", &npu::Graph::begin)
      .def("end", &npu::Graph::end)
      .def("replay", &npu::Graph::replay, py::call_guard<py::gil_scoped_release>())
      .def("reset", &npu::Graph::reset)
      .def("names", &npu::Graph::names)
      .def("__len__", &npu::Graph::size);
  py::class_<npu::ExternalEvent, std::shared_ptr<npu::ExternalEvent>>(m, "ExternalEvent")
      .def(py::init<>())
      .def_readonly("recorded", &npu::ExternalEvent::recorded)
      .def("record", &npu::ExternalEvent::record)
      .def("wait", &npu::wait_for)
      .def("reset", &npu::reset);
  py::class_<npu::TaskGroup>(m, "TaskGroup");
  m.def("begin_group", &npu::begin_group);
  m.def("end_group", &npu::end_group);
  m.def("begin_update", &npu::begin_update);
  m.def("end_update", &npu::end_update);
  m.def("graph_counts", [] {
    const npu::GraphCounts& counts = npu::graph_counts();
    return std::map<std::string, int64_t>{{"captures", counts.captures},
                                          {"replays", counts.replays},
                                          {"steps", counts.steps},
                                          {"updates", counts.updates}};
  });
  m.def("reset_graph_counts", [] { npu::graph_counts() = {}; });

  py::module_::import("torch.distributed");
  py::class_<npu::ProcessGroupHCCL, c10d::Backend, c10::intrusive_ptr<npu::ProcessGroupHCCL>>(m, "ProcessGroupHCCL")
      .def(py::init([](const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size, const std::string& name) {
        return c10::make_intrusive<npu::ProcessGroupHCCL>(gloo, rank, size, name);
      }))
      .def("get_hccl_comm_name", [](const npu::ProcessGroupHCCL& group, int) { return group.name(); });
}
