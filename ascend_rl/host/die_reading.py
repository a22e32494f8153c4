"""Read the state of all dies of a node once: health, temperature, power, HBM, ECC counts, links.

A reading is a plain dict with a list for each figure, one entry a die, so that a week of them stays small:

    {"time": 1795802400.0, "die": [0, 1], "npu": [0, 0], "chip": [0, 1], "health": ["OK", "OK"],
     "temperature_c": [52, 54], "single_bit": [0, 3], "link": ["UP", "UP"], ...}

A figure that the tools print for no die is absent, and None where they print it for other dies only. If there
is no table of dies at all, a reading is {"time", "failed": why}. Nothing is changed on the node.
Cost for n dies of m NPUs: 1 + m calls of npu-smi and at most 4 n of hccn_tool, one after the other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

from ascend_rl.host import npu_tools
from ascend_rl.host.npu_tools import NoAnswer, ToolError

FIGURES = (
    "npu", "chip", "rank", "health", "error", "temperature_c", "power_w", "hbm_used_mb", *npu_tools.ECC,
    "link", "vnic_link", "link_ups", "link_downs", "packet_errors",
)  # fmt: skip
# Options of hccn_tool, and the figures in what each prints.
OPTIONS: dict[str, Callable[[str], dict]] = {
    "link": lambda text: {"link": npu_tools.parse_link(text)},
    "vnic": lambda text: {"vnic_link": npu_tools.parse_link(text)},  # on A3
    "link_stat": npu_tools.parse_link_stat,
    "stat": lambda text: {"packet_errors": npu_tools.parse_packet_errors(text)},
}


class Reader:
    """Reads again and again; what no die answers in the first reading is not asked again.

    Args:
        env: of the tools; ASCEND_RT_VISIBLE_DEVICES selects dies.
        ranks: die -> training rank, as far as known.

    Attributes:
        stopped: no further call is made once it is set.
        calls: how many were made.
    """

    def __init__(self, env: Mapping[str, str] | None = None, ranks: Callable[[], dict[int, str]] = dict):
        self.env, self.ranks = os.environ if env is None else env, ranks
        self.stopped = threading.Event()
        self.options, self.tried = OPTIONS, False
        self.calls = 0

    def read(self) -> dict:
        """A reading as described above; seconds since 1970, Celsius, W, MB."""
        hung: set[str] = set()

        def ask(*command: str) -> str:
            """What it prints; "" if it fails, or hung before in this reading."""
            if command[0] in hung or self.stopped.is_set():
                return ""
            self.calls += 1
            try:
                return npu_tools.run(command, self.env)
            except NoAnswer:
                hung.add(command[0])
            except ToolError:
                pass
            return ""

        now = round(time.time(), 1)
        try:
            self.calls += 1
            dies, _ = npu_tools.parse_npu_smi(npu_tools.run(["npu-smi", "info"], self.env))
        except ToolError as error:
            return {"time": now, "failed": str(error)}
        chosen = npu_tools.visible(self.env)
        dies = [die for die in dies if chosen is None or die.index in chosen]
        npus = {die.npu for die in dies}
        ecc = {npu: npu_tools.parse_ecc(ask("npu-smi", "info", "-t", "ecc", "-i", str(npu))) for npu in npus}
        numbers, found, answered = self.ranks(), [], set()
        for die in dies:
            figures = vars(die) | {"rank": numbers.get(die.index)} | ecc[die.npu].get(die.chip, {})
            if die.health != "OK":
                said = ask("npu-smi", "info", "-t", "health", "-i", str(die.npu), "-c", str(die.chip))
                figures["error"] = npu_tools.error_in(npu_tools.parse_fields(said)[0]) or None
            for option, reader in self.options.items():
                said = reader(ask("hccn_tool", "-i", str(die.index), f"-{option}", "-g"))
                if any(value is not None for value in said.values()):
                    answered.add(option)
                figures |= said
            found.append(figures)
        if not hung and not self.tried:
            self.tried, self.options = True, {name: OPTIONS[name] for name in OPTIONS if name in answered}
        row = {"time": now, "die": [die.index for die in dies]}
        columns = {name: [figures.get(name) for figures in found] for name in FIGURES}
        return row | {name: each for name, each in columns.items() if any(v is not None for v in each)}
