"""Pictures of the five main commands in a terminal of 80 columns, from what they really print.

python bench/screenshots.py [NAME...]

Runs each command on a pseudo-terminal and writes docs/figures/screen_NAME.svg; "run" trains the tiny model
for five steps (2 minutes), the others take seconds. Paths of this machine are shortened.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, LINES = 80, 45
RECIPE = "internal/train_grpo_qwen3_30b_a3b_16die_true_weight.sh internal/qwen3_30b_a3b_env.sh"
SPOILT = "actor_rollout_ref.rollout.n=1 trainer.save_freq=-1"
TINY = "internal/train_gspo_qwen3_tiny_cpu.sh internal/cpu_env.sh"
COMMANDS = {
    "preflight": f"python -m ascend_rl.lint {RECIPE} {SPOILT}",
    "memory_plan": "python -m ascend_rl.memory_plan --model qwen3-32b --dies 32",
    "dry_run": f"bash ray_start_npu.sh --dry-run {TINY}",
    "run": f"bash ray_start_npu.sh {TINY}",
    "report": "python -m ascend_rl.report {run}",
}
# What else would differ between machines: inputs, which are on none of them, and a free port.
SETTINGS = {
    "MODEL_PATH": "/data/Qwen3-30B-A3B",
    "TRAIN_FILE": "/data/deepscaler/train.parquet",
    "TEST_FILE": "/data/aime/test.parquet",
    "RAY_PORT": "6379",
}
WEB_FONT = re.compile(r"@font-face \{\{.*?\}\}\s*", re.S)


def captured(command: str, **variables: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (LINES, COLUMNS))
    environment = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"} | variables
    environment.pop("NO_COLOR", None)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=ROOT, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while True:
            written += os.read(ours, 1 << 16)
    os.close(ours)
    process.wait()
    return written.decode(errors="replace")


def visible(written: str) -> list[str]:
    """The lines that are left on the screen: the last state of those that were drawn over."""
    lines = [re.split(r"\r\x1b\[K", line.rstrip("\r")) for line in written.split("\n")]
    return [next((state for state in reversed(line) if state), "") for line in lines]


def picture(name: str, command: str, lines: list[str]) -> str:
    """An SVG; long output is cut in its middle."""
    if len(lines) > LINES:
        half = LINES // 2
        lines = [*lines[:half], f"... ({len(lines) - 2 * half} lines)", *lines[-half:]]
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for line in [f"$ {command}", *lines]:
        console.print(Text.from_ansi(line), overflow="fold")
    drawn = console.export_svg(title=name, code_format=WEB_FONT.sub("", CONSOLE_SVG_FORMAT), unique_id=name)
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


def screen(name: str, directory: str) -> tuple[str, list[str]]:
    """A command as it is typed, and what it leaves on the screen; a run writes below the directory."""
    place = directory if name in ("run", "report") else "/data"
    command = COMMANDS[name].format(run=f"{place}/run")
    limits = {"OUTPUT_DIR": f"{place}/run", "LOG_DIR": f"{place}/logs", "STEPS": "5"}
    text = captured(command, **SETTINGS, **limits)
    for long, short in {f"{ROOT}/": "", place: "/data"}.items():
        text, command = text.replace(long, short), command.replace(long, short)
    return command, visible(text.rstrip())


def file_of(name: str) -> Path:
    return ROOT / f"docs/figures/screen_{name}.svg"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMMANDS)} (all)")
    names = parser.parse_args().names or list(COMMANDS)
    if unknown := set(names) - set(COMMANDS):
        parser.error(f"no picture is named {', '.join(sorted(unknown))}; there are: {', '.join(COMMANDS)}")
    if "report" in names and "run" not in names:
        names.insert(0, "run")
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            file_of(name).write_text(picture(name, *screen(name, directory)))
            print(file_of(name))


if __name__ == "__main__":
    main()
