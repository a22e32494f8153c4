"""Tell a command of the user's what happens to a run: `ALERT`, called with a JSON on its standard input.

    {"kind": "stall", "step": 3, "message": "...", "time": "2026-11-27T18:00:00+08:00", "output_dir": "..."}

Kinds: ``stall`` (no sign of progress for too long), ``restart`` (a failure, and another start follows),
``nan`` (a metric of a step is no number), ``gap`` (rollout and trainer probabilities differ by more than
GAP_LIMIT), ``die`` (a die of a node may fail, see die_watch.py), ``end`` (of the run, whatever its status).
``nan`` and ``gap`` come once.

The command runs beside the run, in a shell. It has DEADLINE_S; what it prints is thrown away; that it failed
or did not end is one line. A run waits for it only when it ends, and no longer than that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from ascend_rl.launch.first_step import judge

DEADLINE_S = 20.0
# The supervisor collects every child, so the shell says how the command ended.
TOLD = '(\n{command}\n) >/dev/null 2>&1; echo "status $?"'


class Alerts:
    """Of a run.

    Args:
        command: for a shell; "" calls nothing.
        output_dir: of the run.
        say: a line for the user.
        limit: of the probability gap, by a function; 0: none.
    """

    def __init__(
        self,
        command: str = "",
        output_dir: Path = Path(),
        say: Callable[[str], None] = print,
        limit: Callable[[], float] = float,
    ):
        self.command, self.output_dir, self.say, self.limit = command, str(output_dir), say, limit
        self.running: list[threading.Thread] = []
        self.told: set[str] = set()  # kinds that come once
        self.step = 0

    def send(self, kind: str, step: int, message: str) -> None:
        """Call the command; returns at once."""
        if self.command:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            record = {"kind": kind, "step": step, "message": message, "time": now}
            record["output_dir"] = self.output_dir
            thread = threading.Thread(target=self._call, args=[json.dumps(record), kind], daemon=True)
            self.running = [each for each in self.running if each.is_alive()] + [thread]
            thread.start()

    def stepped(self, step: int, row: Mapping[str, float | None]) -> None:
        """The metrics of a training step; verl writes NaN as null."""
        self.step = step
        if not self.command:
            return
        bad = [name for name, value in row.items() if value is None or value != value]
        if bad and "nan" not in self.told:
            self.told.add("nan")
            self.send("nan", step, f"no numbers: {', '.join(bad[:8])}")
        if "gap" not in self.told and (limit := self.limit()):
            agree, sentence = judge(row, limit, f"at step {step}")
            if not agree:
                self.told.add("gap")
                self.send("gap", step, sentence)

    def wait(self) -> None:
        """Until all that were called have ended, or their time has."""
        for thread in self.running:
            thread.join(DEADLINE_S + 1)

    def _call(self, record: str, kind: str) -> None:
        try:
            process = subprocess.Popen(
                ["bash", "-c", TOLD.format(command=self.command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            try:
                said = process.communicate(f"{record}\n", timeout=DEADLINE_S)[0].strip()
                why = "" if said == "status 0" else f"ALERT ended with {said or 'a signal'}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                why = f"ALERT did not end within {DEADLINE_S:g} s"
        except OSError as error:
            why = str(error)
        if why:
            self.say(f"WARNING: the alert '{kind}' may be lost: {why}")
