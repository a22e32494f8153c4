"""MindSpeed, if its checkout is present, compiles operators whose sources use <cstring> without including it.

MindSpeed's own builder gives the source, the flags and the include paths; the compiler checks them. Of the
headers, only the NPU's are not the real ones: they declare what the source wants, and include no <cstring>.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

from mindspeed_tree import MINDSPEED, needs_mindspeed
from ranks import SITE

from ascend_rl.settings import stack

pytestmark = needs_mindspeed
SOURCE = "CachingAllocatorConfig.cpp"  # calls strlen
NAMES = (
    *(f"third_party/acl/inc/acl/{name}.h" for name in ("acl_base", "acl_rt")),
    *(f"torch_npu/csrc/core/npu/{name}.h" for name in ("NPUStream", "NPUCachingAllocator", "NPUFunctions")),
)
HEADER = """
#pragma once
#include <c10/util/Exception.h>
#include <c10/util/irange.h>
#include <array>
#include <functional>
#include <memory>
#include <set>
#include <unordered_set>
enum { ACL_ERROR_NONE, ACL_SUCCESS = 0, ACL_ERROR_FAILURE };
enum { ACL_MEM_HANDLE_TYPE_NONE, ACL_MEM_ALLOCATION_TYPE_PINNED };
enum { ACL_HBM_MEM_HUGE, ACL_MEM_LOCATION_TYPE_DEVICE };
using aclError = int;
using aclrtStream = void*;
using aclrtDrvMemHandle = void*;
struct aclrtPhysicalMemProp {
  int handleType, allocationType, memAttr, reserve;
  struct { int type, id; } location;
};
template <class... Any> aclError aclrtMallocPhysical(Any...);
template <class... Any> aclError aclrtFreePhysical(Any...);
template <class... Any> aclError aclrtReserveMemAddress(Any...);
template <class... Any> aclError aclrtReleaseMemAddress(Any...);
template <class... Any> aclError aclrtMapMem(Any...);
template <class... Any> aclError aclrtUnmapMem(Any...);
namespace c10 { struct GatheredContext; }
namespace c10_npu {
using NPUStream = int;
aclError GetDevice(int*);
namespace NPUCachingAllocator {
struct DeviceStats; struct RecordContext; struct SegmentInfo; struct TraceEntry;
enum struct StatType { AGGREGATE, SMALL_POOL, LARGE_POOL, NUM_TYPES };
struct Stat { int64_t current, peak, allocated, freed; };
using StatArray = std::array<Stat, 3>;
}}
"""
PROGRAM = f"""{"" if stack.NAME == stack.DEFAULT else "import verl  # and with it the hooks"}
import json
from torch.utils.cpp_extension import include_paths
from mindspeed.op_builder import builder, smart_swap_builder

def load(name, sources, extra_include_paths, extra_cflags, **others):
    print(json.dumps([sources, extra_cflags, extra_include_paths + include_paths()]))

builder.load = load
smart_swap_builder.SmartSwapBuilder().load()
"""


def compiled(tmp_path) -> tuple[str, list[str]]:
    """The source, and the arguments of the compiler, as torch's ``load`` is told."""
    path = f"{MINDSPEED}:{SITE}"
    environment = {"PYTHONPATH": path, "ASCEND_HOME_PATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True
    )
    sources, flags, paths = json.loads(run.stdout.splitlines()[-1])
    (source,) = [source for source in sources if source.endswith(SOURCE)]
    return source, [*shlex.split(" ".join(flags)), *(f"-I{path}" for path in paths)]


def test_sources_may_miss_cstring(tmp_path):
    for name in NAMES:
        header = tmp_path / "include" / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(HEADER)
    source, arguments = compiled(tmp_path)
    run = subprocess.run(
        ["c++", "-std=c++17", "-fsyntax-only", "-w", *arguments, source], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
