"""python -m ascend_rl.evaluate: its estimators against brute force, and what a kill or a dead server costs.

The server here answers by rule and counts.
"""

from __future__ import annotations

import collections
import http.server
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ascend_rl.recipe import evaluate
from ascend_rl.settings.switch import CannotWork

GSM8K = [
    {"question": f"How many are {i} and {i}?", "answer": f"They are\n#### {2 * i}"} for i in range(600, 608)
]
PLAIN = [{"problem": f"What is ${i}/2$?", "answer": f"\\frac{{{i}}}{{2}}"} for i in (1, 3, 5)]


class Server(http.server.ThreadingHTTPServer):
    """Right answers to the first ``right`` of a problem's requests, wrong ones after."""

    daemon_threads = True

    def __init__(self, right: int = 1, until: int = 10**9, delay_s: float = 0, refused: str | None = None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.right, self.until, self.delay_s, self.lock = right, until, delay_s, threading.Lock()
        self.refused, self.has_refused = refused, threading.Event()
        self.requests: list[dict] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, content: dict):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply({})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request["messages"][-1]["content"]
        time.sleep(self.server.delay_s)
        if self.server.refused:  # one at once, the others after it
            if self.server.refused in text:
                self.send_error(400, "too long")
                self.server.has_refused.set()
                return
            self.server.has_refused.wait(60)
            time.sleep(0.3)
        with self.server.lock:
            self.server.requests.append(request)
            before = sum(text == other["messages"][-1]["content"] for other in self.server.requests)
            dead = len(self.server.requests) > self.server.until
        if dead:
            self.server.server_close()  # no other connection is taken, and this one ends
            return
        number = int(re.search(r"\d+", text)[0])
        truth = f"so #### {2 * number}" if "####" in text else f"it is \\boxed{{{number / 2}}}"
        self.reply(
            {
                "choices": [
                    {
                        "message": {"content": truth if before <= self.server.right else "so #### 1"},
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"completion_tokens": 7},
            }
        )


def save(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(out: Path, server: Server, *arguments) -> list[str]:
    more = ["--out", out, "--server", server.url, "--concurrency", "2", *arguments]
    return [sys.executable, "-m", "ascend_rl.evaluate", "model", *map(str, more)]


def run(*arguments, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=600, env=os.environ | environment
    )


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def test_pass_at_k_is_the_mean_over_all_subsets():
    for n in range(1, 7):
        for right, k in itertools.product(range(n + 1), range(1, n + 1)):
            samples = [1] * right + [0] * (n - right)
            subsets = list(itertools.combinations(samples, k))
            expected = sum(map(max, subsets)) / len(subsets)
            assert evaluate.pass_at(k, n, right) == pytest.approx(expected), (n, right, k)


def test_majority_is_a_vote_whose_ties_are_drawn():
    for votes in itertools.product([(True, "2"), (False, "3"), (False, "4")], repeat=4):
        counts = collections.Counter(text for _, text in votes)
        first = [text for text in counts if counts[text] == max(counts.values())]
        assert evaluate.majority(list(votes)) == pytest.approx(("2" in first) / len(first))
    assert evaluate.majority([]) == 0


def test_the_interval_is_wilsons_for_independent_samples_and_wider_for_equal_ones():
    low, high = evaluate.interval([1.0] * 40 + [0.0] * 60, 1)
    for bound in (low, high):  # where a score test just rejects
        assert abs(bound - 0.4) / math.sqrt(bound * (1 - bound) / 100) == pytest.approx(1.96, rel=0.02)
    equal = evaluate.interval([1.0] * 40 + [0.0] * 60, 16)  # 16 equal samples tell no more than one
    assert equal == pytest.approx((low, high), abs=1e-3)
    spread = evaluate.interval([0.4] * 100, 16)
    assert low < spread[0] < 0.4 < spread[1] < high
    assert evaluate.interval([1.0] * 10, 4)[0] < 0.8 and evaluate.interval([1.0] * 10, 4)[1] == 1


def test_the_figures_of_two_files(tmp_path):
    data = save(tmp_path / "words.jsonl", GSM8K), save(tmp_path / "plain.jsonl", PLAIN)
    server = Server(right=1)
    result = run(tmp_path / "out", server, "--data", *data, "--n", 4)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())["results"]
    for name, problems in (("words", 8), ("plain", 3)):
        found = report[name]
        assert (found["problems"], found["avg@4"], found["pass@4"], found["maj@4"]) == (problems, 0.25, 1, 0)
        assert found["pass@2"] == pytest.approx(0.5) and found["tokens"] == 7 and found["answered"] == 1
        assert found["interval"][0] < 0.25 < found["interval"][1]
    assert len(server.requests) == 4 * (8 + 3)
    assert "avg@4" in result.stdout and "25.0%" in result.stdout and "words" in result.stdout
    assert {request["temperature"] for request in server.requests} == {0.6}


def test_killed_it_asks_only_for_the_rest(tmp_path):
    data, out = save(tmp_path / "words.jsonl", GSM8K), tmp_path / "out"
    server, samples = Server(right=99, delay_s=0.05), tmp_path / "out/words.jsonl"
    process = subprocess.Popen(
        command(out, server, "--data", data, "--n", 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not (samples.exists() and len(samples.read_bytes().splitlines()) > 6):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with samples.open("ab") as file:
        file.write(b'{"problem": "half a li')
    whole = samples.read_bytes().rpartition(b"\n")[0]
    kept = len(whole.splitlines()) - 1
    server = Server(right=99)
    result = run(out, server, "--data", data, "--n", 4)
    assert result.returncode == 0, result.stderr
    assert len(server.requests) == 32 - kept and samples.read_bytes().startswith(whole + b"\n")
    assert len({(line["problem"], line["nth"]) for line in lines(samples)}) == len(lines(samples)) == 32
    server = Server(right=99)
    assert run(out, server, "--data", data, "--n", 5).returncode == 0 and len(server.requests) == 8
    other = run(out, server, "--data", data, "--n", 5, "--temperature", 1)
    assert other.returncode == 1 and "is of another sampling; choose another --out" in other.stderr


def test_a_server_that_dies_costs_what_was_not_finished(tmp_path):
    data, out = save(tmp_path / "words.jsonl", GSM8K), tmp_path / "out"
    result = run(out, Server(until=5), "--data", data)
    assert result.returncode == 1 and "is gone" in result.stderr and "Traceback" not in result.stderr
    kept = lines(out / "words.jsonl")
    assert len(kept) == 5
    server = Server()
    assert run(out, server, "--data", data).returncode == 0 and len(server.requests) == 3
    assert lines(out / "words.jsonl")[:5] == kept


def test_a_refused_request_costs_nothing_that_is_under_way(tmp_path):
    data, out = save(tmp_path / "words.jsonl", GSM8K), tmp_path / "out"
    result = run(out, Server(refused="601"), "--data", data, "--concurrency", 4)
    assert result.returncode == 1 and "vLLM refuses a request" in result.stderr
    assert len(lines(out / "words.jsonl")) == 3


def test_a_try_that_never_reached_the_server_does_not_bind_the_next(tmp_path):
    """What binds is a sample; a file without one, such as of a first try elsewhere, does not."""
    data, out = save(tmp_path / "words.jsonl", GSM8K), tmp_path / "out"
    gone = Server()
    gone.shutdown()
    gone.server_close()
    result = run(out, gone, "--data", data, "--temperature", 1)
    assert result.returncode == 1 and "is gone" in result.stderr
    save(out / "words.jsonl", [{"model": "another", "sampling": {}, "server": [], "data": "words"}])
    server = Server()
    result = run(out, server, "--data", data)
    assert result.returncode == 0, result.stderr
    assert len(server.requests) == len(lines(out / "words.jsonl")) == 8
    result = run(out, server, "--data", data, "--temperature", 1)
    assert result.returncode == 1 and "is of another sampling" in result.stderr


@pytest.mark.parametrize("name", ["words.jsonl", "report.json"])
@pytest.mark.parametrize("text", [json.dumps(GSM8K[0]), json.dumps(GSM8K[0]) + "\n", '{\n "steps": 3\n}\n'])
def test_files_of_others_stay_as_they_are(tmp_path, name, text):
    """Such as --out in the directory of the data, or of a training run."""
    data, out = save(tmp_path / "words.jsonl", GSM8K), tmp_path / "out"
    out.mkdir()
    (out / name).write_text(text)
    server = Server()
    result = run(out, server, "--data", data)
    assert result.returncode == 1 and f"{out / name} is not of an evaluation" in result.stderr, result.stderr
    assert (out / name).read_text() == text and [path.name for path in out.iterdir()] == [name]
    assert not server.requests


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "What is 3?", "answer": None},
        {"question": "What is 3?", "answer": None},
        {"question": None, "answer": "#### 3"},
        {"problem": "What is 3?", "answer": float("nan")},
        {"problem": None, "answer": "3"},
        {"prompt": [{"role": "user", "content": "What is 3?"}], "reward_model": {"ground_truth": None}},
        {"prompt": [{"role": "user", "content": "What is 3?"}], "reward_model": None},
        {"prompt": None, "reward_model": {"ground_truth": "3"}},
    ],
)
def test_a_null_is_no_problem_and_no_answer(tmp_path, row):
    (name, problems) = evaluate.load(str(save(tmp_path / "x.jsonl", [row, *PLAIN])), "hf")
    assert [problem.answer for problem in problems] == [row["answer"] for row in PLAIN]
    with pytest.raises(CannotWork, match="no row with a problem and an answer"):
        evaluate.load(str(save(tmp_path / "y.jsonl", [row])), "hf")


def test_numbers_may_be_answers(tmp_path):
    rows = [{"problem": f"{n}?", "answer": n} for n in (0, 4, 0.5)]
    _, problems = evaluate.load(str(save(tmp_path / "x.jsonl", rows)), "hf")
    assert [problem.answer for problem in problems] == ["0", "4", "0.5"]


def test_a_seed_gives_each_sample_its_own(tmp_path):
    data = save(tmp_path / "words.jsonl", GSM8K)
    seeds = []
    for out in ("one", "two"):
        server = Server()
        assert run(tmp_path / out, server, "--data", data, "--n", 2, "--seed", 3).returncode == 0
        seeds.append({request["seed"] for request in server.requests})
    assert seeds[0] == seeds[1] and len(seeds[0]) == 16


def test_offline_it_asks_for_a_file(tmp_path):
    server = Server()
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    result = run(tmp_path / "out", server, "--data", "math500", **environment)
    assert result.returncode == 1 and "give the file: --data FILE" in result.stderr
    assert "Traceback" not in result.stderr and not server.requests
    result = run(tmp_path / "out", server, "--data", "nonesuch")
    assert result.returncode == 1 and "neither a file nor one of gsm8k, aime, math500" in result.stderr
