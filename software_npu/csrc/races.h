// Races between streams, if SOFTWARE_NPU_RACES=1. Calls run immediately here, so a race changes no result: it is
// refused where a device might show it. Each stream has a clock of its calls; an event carries the clock of its
// stream to whoever waits for it, and a call comes after all that its thread has waited for. Memory remembers the stream
// it was made on and what last used it (vector clocks, as in race detectors). Refused are a call that reads what a
// stream has written, or writes what a stream uses, without waiting for that stream; and an allocation on a stream
// where memory of this stream was freed while another may still use it: the allocator gives it out immediately, unless
// record_stream() told of the other. Pinned memory must hold what a copy shall read until the thread that asked for
// the copy has waited for it; that is looked at when it waits.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace software_npu {

using Clock = std::unordered_map<c10::Stream, int64_t>;  // of each stream, the last call known to have ended

struct Trace {
  c10::Stream made;
  c10::Stream writer;
  int64_t written = 0;
  std::string by;  // what wrote it
  Clock uses;
  std::unordered_set<c10::Stream> recorded;
};

bool races_refused();

// Of memory that is allocated on the current stream; null if races are not refused. Refuses to give out what another
// stream may still use.
std::unique_ptr<Trace> new_trace(int device);
void freed(std::unique_ptr<Trace> trace);
void record_use(Trace* trace, c10::Stream stream);

// One call on a stream: all it touches, then `called`.
void touch(Trace* trace, c10::Stream stream, bool writes, const std::string& name);
void called(c10::Stream stream);

// Pinned memory that a copy on a stream, the last call on it, reads; it is given back.
void sent(const void* data, size_t bytes, c10::Stream stream);
void no_longer_sent(const void* data, size_t bytes);

// What the host or a stream waits for.
Clock clock_of(c10::Stream stream);
Clock host_clock();  // of this thread
void wait_for_clock(c10::Stream stream, const Clock& clock);
void host_waits(const Clock& clock);
void host_waits_for_all();

}  // namespace software_npu
