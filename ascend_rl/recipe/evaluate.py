"""How often a model is right on a data set: avg@n, pass@k and maj@n, with vLLM's server on any device.

    python -m ascend_rl.evaluate Qwen3-32B-gspo --data aime math500 --n 16

The command starts ``vllm serve`` (what follows ``--`` goes to it), sends each sample as a request of its own,
scores it with the reward of the math recipes, and appends it to OUT/DATA.jsonl. A killed evaluation is
continued by the same command: what is in the file is not asked again. More samples (--n) or more problems
continue it, too; another model, sampling or data are refused.

pass@k is the unbiased estimate 1 - C(n - c, k) / C(n, k) for c of n samples right (Chen et al., 2021),
averaged over problems. maj@n votes: right answers are one candidate, wrong ones are told apart by their text
or number; a tie counts in proportion. The interval of avg@n is Wilson's at 95%, for the number of samples
that tell as much as n samples of each problem do: those of one problem are not independent.

Invariants (tests/test_evaluate.py): a finished sample is on the disk before it counts, and is never asked
again; the estimators equal brute force. Cost: the samples; the rest is one line of JSON each.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from ascend_rl.process.ports import free_port
from ascend_rl.recipe.data import (
    BOXED,
    DATASETS,
    HASHES,
    Problem,
    asked,
    fetch,
    from_verl,
    read_rows,
    text_of,
)
from ascend_rl.recipe.math_reward import compute_score, extract_answer
from ascend_rl.recipe.math_text import number, plain
from ascend_rl.settings.numbers import real, whole
from ascend_rl.settings.switch import CannotWork, ending

START_DEADLINE_S = 3600.0  # a large model from slow storage
TRIES = 3  # of a request; a server that is gone ends the evaluation
Z95 = 1.96
PR_SET_PDEATHSIG = 1
BEGINS = '{"model":'  # the files of an evaluation, but for spaces


# Data.


def from_any(row: dict) -> Problem:
    """A row of verl's format, of GSM8K's, or one with a problem (or question) and an answer."""
    if "reward_model" in row:
        return from_verl(row)
    row = {key.lower(): value for key, value in row.items()}
    question = row["problem"] if "problem" in row else row["question"]
    answer = text_of(row["answer"])
    if "####" in answer:
        return asked(question, answer.rpartition("####")[2].replace(",", ""), HASHES)
    return asked(question, answer, BOXED)


def load(data: str, source: str) -> tuple[str, list[Problem]]:
    """The name and the problems of a known data set or of a file.

    Raises:
        CannotWork: it is neither, or cannot be fetched, or has no usable rows.
    """
    if data in DATASETS and "test" in DATASETS[data].files:
        path = fetch(DATASETS[data], source, "test")
        convert = DATASETS[data].convert
    else:
        known = ", ".join(name for name, dataset in DATASETS.items() if "test" in dataset.files)
        path, convert = Path(data), from_any
        if not path.is_file():
            raise CannotWork(f"--data {data} is neither a file nor one of {known}")
    problems: dict[str, Problem] = {}
    for place, row in enumerate(read_rows(path)):
        try:
            problem = convert(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise CannotWork(f"{path}: row {place} has the columns {sorted(row)}: {error!r}") from error
        if problem.prompt and problem.prompt[-1]["content"].strip() and problem.answer:
            problems.setdefault(key_of(problem), problem)  # AIME 2024 is published with each problem 32 times
    if not problems:
        raise CannotWork(f"{path} has no row with a problem and an answer")
    return (data if data in DATASETS else path.stem), list(problems.values())


def key_of(problem: Problem) -> str:
    text = json.dumps([problem.prompt, problem.answer], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Estimates.


def pass_at(k: int, n: int, right: int) -> float:
    """The chance that one of k samples is right, of n of which ``right`` are; without bias.

    >>> pass_at(1, 4, 1), pass_at(2, 4, 1), pass_at(4, 4, 1)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def majority(votes: list[tuple[bool, str]]) -> float:
    """The chance that the most frequent answer is right: 0 or 1, or in between for a tie.

    >>> majority([(True, "2"), (False, "3"), (True, "2.0")]), majority([(True, "2"), (False, "3")])
    (1.0, 0.5)
    """
    counts = collections.Counter("right" if right else f"wrong {text}" for right, text in votes)
    most = max(counts.values(), default=0)
    first = [name for name, count in counts.items() if count == most]
    return float("right" in first) / len(first) if first else 0.0


def candidate(text: str) -> str:
    """What answers of equal text or number have in common.

    >>> candidate("1,000") == candidate("1000.0")
    True
    """
    value = number(text)
    if value is None:
        return plain(text)
    digits = f"{value:f}"
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) if value else "0"


def interval(means: list[float], n: int) -> tuple[float, float]:
    """Wilson's 95% interval of the mean of problems with n samples each."""
    p, problems = statistics.fmean(means), len(means)
    variance = statistics.variance(means) if problems > 1 else 0.0
    samples = p * (1 - p) * problems / variance if variance else problems
    samples = min(max(samples, 1), problems * n)
    centre = (p + Z95**2 / (2 * samples)) / (1 + Z95**2 / samples)
    half = Z95 / (1 + Z95**2 / samples) * math.sqrt(p * (1 - p) / samples + Z95**2 / (4 * samples**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def summarise(samples: dict[tuple[str, int], dict], problems: list[Problem], n: int) -> dict:
    """The figures of one data set, from all samples of all problems."""
    groups = [[samples[key_of(problem), nth] for nth in range(n)] for problem in problems]
    flat = [sample for group in groups for sample in group]
    right = [sum(sample["score"] > 0 for sample in group) for group in groups]
    means = [count / n for count in right]
    ks = sorted({k for k in (2**e for e in range(20)) if k < n} | {n})
    votes = [
        [(sample["score"] > 0, sample["answer"]) for sample in group if sample["answer"] is not None]
        for group in groups
    ]
    low, high = interval(means, n)
    return {
        "problems": len(problems),
        "n": n,
        f"avg@{n}": statistics.fmean(means),
        "interval": [low, high],
        **{f"pass@{k}": statistics.fmean(pass_at(k, n, count) for count in right) for k in ks if k > 1},
        **({f"maj@{n}": statistics.fmean(map(majority, votes))} if n > 1 else {}),
        "answered": statistics.fmean(sample["answer"] is not None for sample in flat),
        "cut off": statistics.fmean(sample["finish"] == "length" for sample in flat),
        "tokens": statistics.fmean(sample["tokens"] for sample in flat),
    }


def table(results: dict[str, dict], width: int | None = None) -> None:
    """Print the results, a column for each data set."""
    from rich.console import Console
    from rich.table import Table

    rows = list(dict.fromkeys(name for result in results.values() for name in result))
    shown = Table("", *results)
    for name in rows:
        shown.add_row(name, *(show(name, result.get(name)) for result in results.values()))
    Console(width=width).print(shown)


def show(name: str, value) -> str:
    if value is None:
        return "-"
    if name == "interval":
        return f"{value[0]:.1%} to {value[1]:.1%}"
    return f"{value:.0f}" if name in ("problems", "n", "tokens") else f"{value:.1%}"


# Samples on the disk.


def refuse_other(path: Path) -> None:
    """Raise CannotWork for a file that no evaluation wrote, such as a data set or a training run's report."""
    with contextlib.suppress(FileNotFoundError), path.open(errors="replace") as file:
        start = "".join(file.read(20).split())
        if start[: len(BEGINS)] != BEGINS[: len(start)]:
            raise CannotWork(f"{path} is not of an evaluation; choose another --out")


class Finished:
    """OUT/NAME.jsonl: a line for the settings, then one for each sample, on the disk when it counts.

    The settings are written with the first sample: a try that never got one binds nothing.
    """

    def __init__(self, path: Path, settings: dict):
        self.path, self.settings, self.samples = path, settings, {}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        refuse_other(path)
        whole = [json.loads(line) for line in lines[:-1]]  # a kill cut off what follows the last newline
        if len(whole) < 2:
            whole, lines = [], [b""]
        if whole and whole[0] != settings:
            different = [key for key in settings if whole[0].get(key) != settings[key]]
            raise CannotWork(
                f"{path} is of another {', '.join(different) or 'version'}; choose another --out or remove it"
            )
        for sample in whole[1:]:
            self.samples[sample["problem"], sample["nth"]] = sample
        self.file = path.open("ab")
        self.file.truncate(sum(len(line) + 1 for line in lines[:-1]))

    def _append(self, record: dict) -> None:
        self.file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def add(self, sample: dict) -> None:
        if not self.samples:
            self._append(self.settings)
        self._append(sample)
        self.samples[sample["problem"], sample["nth"]] = sample


# The server.


@contextlib.contextmanager
def server(model: str, options: list[str], log: Path, deadline_s: float = START_DEADLINE_S):
    """The address of vLLM's server of a model, while it runs; its output goes to ``log``."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model", *options]
    libc = ctypes.CDLL(None)

    def ended_with_this_process() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, preexec_fn=ended_with_this_process
        )
    url = f"http://127.0.0.1:{port}"
    try:
        began = time.monotonic()
        while not alive(url):
            if process.poll() is not None or time.monotonic() - began > deadline_s:
                lines = log.read_text(errors="replace").splitlines()[-15:]
                raise CannotWork(f"vLLM's server did not start; the end of {log}:\n" + "\n".join(lines))
            time.sleep(0.5)
        yield url
    finally:
        for number, patience_s in ((signal.SIGTERM, 30), (signal.SIGKILL, 30)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)


def alive(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10):
            return True
    except OSError:
        return False


def ask(url: str, request: dict) -> dict:
    """The response to one chat request.

    Raises:
        CannotWork: the server refuses it, or is gone.
    """
    body = json.dumps(request).encode()
    for left in reversed(range(TRIES)):
        call = urllib.request.Request(
            f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(call) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise CannotWork(
                f"vLLM refuses a request: {error.read().decode(errors='replace')[:500]}"
            ) from error
        except (OSError, ValueError) as error:
            if not left or not alive(url):
                raise CannotWork(
                    f"vLLM's server at {url} is gone ({error}); run the same command again"
                ) from error
    raise AssertionError


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int | None
    seed: int | None
    thinking: bool

    def request(self, problem: Problem, nth: int) -> dict:
        asked_for = {"model": "model", "messages": problem.prompt}
        asked_for |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        if self.max_tokens:
            asked_for["max_tokens"] = self.max_tokens
        if self.seed is not None:  # of each sample its own, whatever the order
            text = f"{self.seed} {key_of(problem)} {nth}"
            asked_for["seed"] = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
        if not self.thinking:
            asked_for["chat_template_kwargs"] = {"enable_thinking": False}
        return asked_for


def judged(problem: Problem, nth: int, response: dict) -> dict:
    """The line of a sample."""
    choice = response["choices"][0]
    text = choice["message"]["content"] or ""
    score = compute_score("", text, problem.answer)
    answer = extract_answer(text)
    return {
        "problem": key_of(problem),
        "nth": nth,
        "score": score["score"],
        "answer": None if answer is None else candidate(answer),
        "truth": problem.answer,
        "finish": choice["finish_reason"],
        "tokens": response["usage"]["completion_tokens"],
        "response": text,
    }


def collect(
    url: str, name: str, problems: list[Problem], n: int, sampling: Sampling, finished: Finished, at_once: int
) -> None:
    """Ask for every sample that is not finished."""
    from tqdm import tqdm

    waiting = iter(
        [(p, nth) for nth in range(n) for p in problems if (key_of(p), nth) not in finished.samples]
    )
    total = len(problems) * n
    wanted = {(key_of(problem), nth) for problem in problems for nth in range(n)}
    done = [sample for key, sample in finished.samples.items() if key in wanted]
    right, tokens = sum(sample["score"] > 0 for sample in done), 0
    began = time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(at_once)
    running: dict[concurrent.futures.Future, tuple[Problem, int]] = {}
    try:
        with tqdm(total=total, initial=len(done), desc=name, unit=" samples") as progress:
            failed = None
            while True:
                while not failed and len(running) < at_once and (following := next(waiting, None)):
                    running[pool.submit(ask, url, sampling.request(*following))] = following
                if not running:
                    break
                ready, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in ready:
                    problem, nth = running.pop(future)
                    if error := future.exception():
                        failed = failed or error  # what is under way is still waited for, and kept
                        continue
                    sample = judged(problem, nth, future.result())
                    finished.add(sample)
                    right, tokens = right + (sample["score"] > 0), tokens + sample["tokens"]
                    speed = tokens / max(time.monotonic() - began, 1e-9)
                    right_share = right / (progress.n + 1)
                    progress.set_postfix_str(f"right {right_share:.1%}, {speed:.0f} tokens/s", refresh=False)
                    progress.update()
            if failed:
                raise failed
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def identity(model: str) -> str:
    """What tells a model from another one at its path."""
    path = Path(model)
    if not path.is_dir():
        return model
    files = sorted(p for p in path.iterdir() if p.suffix in (".json", ".safetensors", ".jinja"))
    seen = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return f"{path.resolve()} {hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]}"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    known = [name for name, dataset in DATASETS.items() if "test" in dataset.files]
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.evaluate",
        description="How often a model is right: avg@n, pass@k, maj@n. Killed, the same command continues.",
        epilog="""Examples:
  python -m ascend_rl.evaluate Qwen3-32B-gspo --data aime math500 --n 16 -- --tensor-parallel-size 4
  python -m ascend_rl.evaluate data/tiny/model --data data/tiny/val.parquet --temperature 0 -- --dtype float32

Writes into --out a .jsonl of all samples for each data set, report.json and server.log. What follows -- goes
to `vllm serve`.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="Hugging Face directory or name")
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(known)}, or .parquet, .jsonl, .json",
    )
    parser.add_argument("--out", type=Path, help="where the samples are (outputs/evaluation/MODEL)")
    parser.add_argument("--n", type=whole(), default=1, help="samples of each problem (1)")
    parser.add_argument("--limit", type=whole(), help="only the first problems of each data set")
    parser.add_argument("--temperature", type=real(), default=0.6, help="0: greedy (0.6)")
    parser.add_argument("--top-p", type=real(high=1), default=0.95, help="(0.95)")
    parser.add_argument("--top-k", type=whole(-1), default=-1, help="-1: all (-1)")
    parser.add_argument("--max-tokens", type=whole(), help="of a response (what the context leaves)")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), help="makes samples repeatable; slower on NPUs")
    parser.add_argument(
        "--no-thinking", action="store_true", help="for chat templates that can be asked not to"
    )
    parser.add_argument(
        "--source", choices=("hf", "modelscope"), default="hf", help="of named data sets (hf)"
    )
    parser.add_argument("--concurrency", type=whole(), default=256, help="requests at a time (256)")
    parser.add_argument("--server", metavar="URL", help="a running server, whose model is called 'model'")
    argv = sys.argv[1:] if argv is None else argv
    own, _, serve = ("\0".join(argv)).partition("\0--\0")
    args = parser.parse_args(own.split("\0") if own else [])
    args.serve = serve.split("\0") if serve else []
    if args.n > 1 and args.temperature == 0:
        parser.error("--temperature 0 gives the same sample each time: use --n 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    out = args.out or Path("outputs/evaluation", Path(args.model).resolve().name)
    sampling = Sampling(
        args.temperature, args.top_p, args.top_k, args.max_tokens, args.seed, not args.no_thinking
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped
    with ending() as status:
        refuse_other(out / "report.json")
        sets = dict(load(data, args.source) for data in args.data)
        sets = {name: problems[: args.limit] for name, problems in sets.items()}
        settings = {"model": identity(args.model), "sampling": vars(sampling), "server": args.serve}
        files = {name: Finished(out / f"{name}.jsonl", settings | {"data": name}) for name in sets}
        with contextlib.ExitStack() as stack:
            left = any(
                (key_of(p), nth) not in files[name].samples
                for name, problems in sets.items()
                for p in problems
                for nth in range(args.n)
            )
            url = args.server
            if left and not url:
                print(f"starting vllm serve {args.model}; its output is in {out / 'server.log'}", flush=True)
                url = stack.enter_context(server(args.model, args.serve, out / "server.log"))
            if left:
                for name, problems in sets.items():
                    collect(url, name, problems, args.n, sampling, files[name], args.concurrency)
        results = {name: summarise(files[name].samples, problems, args.n) for name, problems in sets.items()}
        (out / "report.json").write_text(json.dumps(settings | {"results": results}, indent=2) + "\n")
        table(results)
        print(f"{out / 'report.json'}")
    return status.code
