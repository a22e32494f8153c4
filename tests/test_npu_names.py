"""Every torch_npu name that our patches and modules use exists in the pinned wheel."""

from __future__ import annotations

import json
import re

from wheels import wheels_file

OPERATOR = re.compile(r"torch\.ops\.(npu|atb|_C_ascend)\.(\w+)")
NAME = re.compile(r"\b(torch_npu|torch\.npu)((?:\.\w+)+)")
HCCL = re.compile(r"""["'](hccl_\w+)["']""")


def test_names_of_torch_npu(root):
    known = json.loads(wheels_file().read_text())
    operators = {
        space: {re.split(r"[.(]", schema)[0] for schema in known[space]}
        for space in ("npu", "atb", "_C_ascend")
    }
    names = {module: set(found) for module, found in known["names"].items()}
    names["torch_npu"] |= operators["npu"] | set(known["atb names"]["torch_npu"])
    # The file of the ATB operators' names is _atb_ops.py.
    names |= {"torch_npu.op_plugin": {"atb"}, "torch_npu.op_plugin.atb": {"_atb_ops"}}
    names["torch_npu"].add("op_plugin")
    names["torch_npu.atb"] = set(known["atb names"]["torch_npu.atb"])
    used, missing = set(), []
    for path in [*root.glob("patches/*/*.patch"), *root.glob("ascend_rl/*/*.py")]:
        text = path.read_text()
        if path.suffix == ".patch":
            text = "\n".join(line[1:] for line in text.splitlines() if re.match(r"\+(?!\+\+ )", line))
        for space, operator in OPERATOR.findall(text):
            used.add(operator)
            missing += [f"{path.name}: {operator}"] * (operator not in operators[space])
        for option in HCCL.findall(text):
            used.add(option)
            missing += [f"{path.name}: {option}"] * (option not in known["HCCL options"])
        for begin, dotted in NAME.findall(text):
            module, *parts = [begin.replace("torch.npu", "torch_npu.npu"), *dotted.split(".")[1:]]
            used.add(begin + dotted)
            for part in parts:
                if module not in names:
                    break  # an attribute of something else than a module
                if part not in names[module] and f"{module}.{part}" not in names:
                    missing.append(f"{path.name}: {module}.{part}")
                module = f"{module}.{part}"
    assert not missing
    assert "torch.npu.memory._set_allocator_settings" in used and "hccl_op_expansion_mode" in used
