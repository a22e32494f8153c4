"""Run npu-smi and hccn_tool, and read what they print.

The tools of the Ascend driver print tables and lines for people, which differ a little between releases: a
Phy-ID column and a second chip on A3, "15503/ 65536" without the blank, a column for the process id in a
container. Every reader here is a pure function of the text, tested on samples of each form (tests/samples/),
and returns None for what it does not find rather than guessing. `run` is the only function that starts a
process: with a deadline, without a shell, and with the output of a tool that hangs thrown away.

Two networks join the dies of different nodes. RoCE: address by `-ip`, link by `-link`, test by `-ping`. On A3
also HCCS inside a super node: address and link by `-vnic`, test by `-hccs_ping`; there the RoCE link may be
DOWN while everything works.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Series, for one of which vllm-ascend is compiled, as its setup.py names them: by how the chip's name begins.
SERIES = {"ascend910b": "A2", "ascend910_93": "A3", "ascend310p": "_310P"}
DEADLINE_S = 10.0  # npu-smi answers in about a second; one that hangs tells of a hung driver
# Counts of `npu-smi info -t ecc`. The single-bit twins of the last two are always 0.
ECC = {
    "single_bit": "HBM Single Bit Error Count",
    "double_bit": "HBM Double Bit Error Count",
    "isolated_pages": "HBM Double Bit Isolated Pages Count",
    "pages_to_isolate": "HBM Double Bit Next-Isolated Pages Count",  # at the next reset
}
# Not roce_qp_status_err_num, which also grows when a peer ends.
PACKET_ERRORS = (
    "mac_tx_bad_pkt_num",
    "mac_rx_bad_pkt_num",
    "roce_tx_err_pkt_num",
    "roce_rx_err_pkt_num",
    "roce_verification_err_num",
)
# Where the driver puts them when they are not on PATH.
USUAL_PLACES = {"npu-smi": "/usr/local/bin/npu-smi", "hccn_tool": "/usr/local/Ascend/driver/tools/hccn_tool"}


class ToolError(Exception):
    """A tool of the driver is absent, failed, hung, or printed something unknown; the text says which."""


class NoAnswer(ToolError):
    """A tool did not end before its deadline: the driver may hang."""


@dataclass(frozen=True)
class Die:
    """One row pair of `npu-smi info`; an A3 NPU has two chips (dies)."""

    npu: int
    chip: int
    index: int  # as in ASCEND_RT_VISIBLE_DEVICES and `hccn_tool -i`
    name: str
    health: str  # "OK", or "Warning", "Alarm", "Critical", "UNKNOWN"
    hbm_used_mb: int | None
    hbm_total_mb: int | None
    bus: str  # address of its PCI function
    power_w: float | None = None  # None for the second chip on A3
    temperature_c: float | None = None


@dataclass(frozen=True)
class Process:
    """A process on a die, as far as npu-smi sees it: those of other containers may be missing."""

    npu: int
    chip: int
    pid: int
    name: str
    memory_mb: int


def find(name: str, env: Mapping[str, str]) -> str | None:
    """The path of a tool, on PATH or where the driver puts it."""
    program = shutil.which(name, path=env.get("PATH")) or USUAL_PLACES.get(name)
    return program if program and os.access(program, os.X_OK) else None


def run(command: Sequence[str], env: Mapping[str, str] | None = None, deadline_s: float = DEADLINE_S) -> str:
    """The standard output of a tool.

    Raises:
        ToolError: it is absent, fails, or does not end before the deadline (NoAnswer); then it is killed.
    """
    env = os.environ if env is None else env
    name = command[0]
    program = find(name, env)
    if not program:
        raise ToolError(f"{name} is not on PATH")
    try:
        process = subprocess.Popen(
            [program, *command[1:]],
            env={**env, "LC_ALL": "C"},
            text=True,
            errors="replace",
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:  # a binary for another machine, for example
        raise ToolError(f"{name} cannot be run: {error.strerror}") from None
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()  # one stuck in the driver cannot be waited for
        process.stderr.close()
        raise NoAnswer(f"`{' '.join(command)}` did not answer within {deadline_s:.0f} s") from None
    if process.returncode:
        said = (err.strip() or out.strip() or "no message").splitlines()[-1]
        raise ToolError(f"`{' '.join(command)}` failed with status {process.returncode}: {said.strip()}")
    return out


def parse_npu_smi(text: str) -> tuple[list[Die], list[Process]]:
    """Dies and processes in the table of `npu-smi info`.

    Raises:
        ToolError: there is no die in it; npu-smi also ends with status 0 when it found no driver.
    """
    dies: list[Die] = []
    processes: list[Process] = []
    head: tuple[int, str, list[str]] | None = None  # npu, name, other cells: the first row of a pair
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        words = cells[0].split()
        if len(cells) < 3 or not words or not words[0].isdigit():
            continue
        if len(cells) > 3:  # the second table
            if len(words) == 2 and cells[1].isdigit():
                memory = int(cells[3]) if cells[3].isdigit() else 0
                processes.append(Process(int(words[0]), int(words[1]), int(cells[1]), cells[2], memory))
        elif head is None:
            head = (int(words[0]), " ".join(words[1:]), cells[1:])
        else:
            usage = re.findall(r"([^\s/]+)\s*/\s*([^\s/]+)", cells[2])  # memory, then HBM
            used, total = (int(v) if v.isdigit() else None for v in (usage or [("", "")])[-1])
            index = int(words[1]) if len(words) > 1 and words[1].isdigit() else len(dies)
            npu, name, (health, figures, *_) = head
            power, temperature, *_ = [*map(measured, figures.split()), None, None]
            chip = int(words[0])
            dies.append(Die(npu, chip, index, name, health, used, total, cells[1], power, temperature))
            head = None
    if not dies or head is not None:
        first = next((line.strip() for line in text.splitlines() if line.strip(" +-=")), "nothing")
        raise ToolError(f"`npu-smi info` shows no table of dies, it printed: {first}")
    return dies, processes


def visible(env: Mapping[str, str]) -> set[int] | None:
    """The dies in ASCEND_RT_VISIBLE_DEVICES; None if it makes no selection."""
    words = env.get("ASCEND_RT_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    return {int(word) for word in words} if words != [""] and all(map(str.isdigit, words)) else None


def measured(word: str) -> float | None:
    """A number of the table; None for "-" and "NA"."""
    return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else None


def parse_fields(text: str) -> list[dict[str, str]]:
    """`name : value` lines of `npu-smi info -t ...`, one dict for each chip.

    With several chips a "Chip ID" line ends the fields of each; lines before the first empty line (NPU ID,
    Chip Count) belong to all of them.
    """
    header: dict[str, str] = {}
    blocks: list[dict[str, str]] = []
    current: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if not line.strip() and not header:
            header, current = current, {}
        elif colon:
            current[name.strip()] = value.strip()
            if name.strip() == "Chip ID" and len(current) > 1:
                blocks.append(header | current)
                current = {}
    if current or not blocks:
        blocks.append(header | current)
    return blocks


def error_in(fields: Mapping[str, str]) -> str:
    """Code and text of what is wrong with a die, in the fields of `-t health`; "" if nothing is said."""
    words = (fields.get("Error Code"), fields.get("Error Information"))
    return " ".join(word for word in words if word and word != "NA")


def parse_ecc(text: str) -> dict[int, dict[str, int]]:
    """Counts of HBM's ECC in `npu-smi info -t ecc -i NPU`, of each chip, as ECC names them.

    Errors count from the last reset of the die, isolated pages over its life.
    """
    found = {}
    for number, block in enumerate(parse_fields(text)):
        counts = {name: int(block[field]) for name, field in ECC.items() if block.get(field, "").isdigit()}
        if counts:
            found[int(block.get("Chip ID", number))] = counts
    return found


def first_npu(env: Mapping[str, str] | None = None) -> int:
    """The number of the first NPU that is here; a container may have been given others than 0 and 1.

    Raises:
        ToolError: npu-smi is absent or fails, or shows no die.
    """
    dies, _ = parse_npu_smi(run(["npu-smi", "info"], env))
    return dies[0].npu


def chip_name(env: Mapping[str, str] | None = None, npu: int | None = None) -> str:
    """The chip of an NPU, as CANN and vllm-ascend's SOC_VERSION name it: ascend910_9391, ascend910b3.

    Of the first NPU, if none is given. An A2 prints "Ascend" as Chip Type and "910B3" as Chip Name; an A3
    prints no type, "Ascend910" and an NPU Name.

    Raises:
        ToolError: npu-smi is absent or fails, or names no chip.
    """
    if npu is None:
        npu = first_npu(env)
    blocks = parse_fields(run(["npu-smi", "info", "-t", "board", "-i", str(npu), "-c", "0"], env))
    fields = {key: value for block in blocks for key, value in block.items()}  # of one chip, in any order
    kind, chip, name = (fields.get(key, "") for key in ("Chip Type", "Chip Name", "NPU Name"))
    if not chip or not (kind or name):
        raise ToolError(f"`npu-smi info -t board -i {npu} -c 0` names no chip")
    return (kind + chip if kind else f"{chip}_{name}").lower()


def series(chip: str) -> str | None:
    """The series of a chip; None if vllm-ascend knows none.

    >>> series("ascend910_9391"), series("ascend910b3"), series("ascend950")
    ('A3', 'A2', None)
    """
    return next((name for beginning, name in SERIES.items() if chip.startswith(beginning)), None)


def built_for(package: Path) -> str | None:
    """The series in _build_info.py of the package vllm_ascend; None if nothing was built."""
    path = package / "_build_info.py"
    found = re.search(r"__device_type__ = '(\w+)'", path.read_text()) if path.is_file() else None
    return found and found[1]


def parse_equals(text: str) -> dict[str, str]:
    """`name=value` lines of version.info and ascend_toolkit_install.info, names in lower case."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip().lower(): value.strip() for name, equals, value in pairs if equals}


def parse_link(text: str) -> str | None:
    """ "UP" or "DOWN", of `-link -g` and of `-vnic -g`."""
    match = re.search(r"link status:\s*(\w+)", text)
    return match and match[1].upper()


def parse_link_stat(text: str) -> dict[str, int]:
    """How often a link came up and went down, of `-link_stat -g`; older tools count only the first."""
    counts = re.findall(r"link (up|down) count\s*:\s*(\d+)", text)
    return {f"link_{way}s": int(count) for way, count in counts}


def parse_packet_errors(text: str) -> int | None:
    """Bad packets of a RoCE port, sent and received, in `-stat -g`."""
    counts = re.findall(rf"\b(?:{'|'.join(PACKET_ERRORS)}):\s*(\d+)", text)
    return sum(map(int, counts)) if counts else None


def parse_address(text: str) -> str | None:
    """The IPv4 address in `-ip -g` or `-vnic -g`; None also for 0.0.0.0."""
    match = re.search(r"ipaddr:\s*([\d.]+)", text)
    return match[1] if match and match[1] != "0.0.0.0" else None


def parse_tls(text: str) -> int | None:
    """The switch in `-tls -g`: 1 if connections between dies are encrypted, else 0."""
    match = re.search(r"tls switch\s*\[(\d)\]", text)
    return match and int(match[1])


def parse_net_health(text: str) -> str | None:
    """The status in `-net_health -g`: "Success", "Init" (nothing to detect is configured), "Fault", ..."""
    match = re.search(r"net health status:\s*(.+)", text)
    return match and match[1].strip()


def parse_ping(text: str) -> float | None:
    """Share of packets lost, 0 to 1, of `-ping -g`, `-hccs_ping -g` and ping(8); None without a summary line.

    Counted from the packets: a search for "0.00% packet loss" would also find "100.00% packet loss".
    """
    match = re.search(r"(\d+) packets transmitted, (\d+) (?:packets )?received", text)
    return 1 - int(match[2]) / int(match[1]) if match and int(match[1]) else None
