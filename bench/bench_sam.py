"""Model-free drafts on recorded text: tokens per step, and the cost of a draft.

Usage:    python bench/bench_sam.py [--quick]
Example:  python bench/bench_sam.py            # about 2 minutes; --quick under one
1. Tokens per step: recorded text replaces the model. A step verifies a draft against the actual continuation
   and keeps the matching tokens plus one more. A server runs 16 requests; all draft, then all are verified.
   "engine" is what vLLM and vllm-ascend run: SamProposer, which weighs a step's drafts against their time;
   "engine, graphs" pads them to full length. Speed: tokens per second over those without speculation, where a
   step takes the published time for its tokens (STEP_TIMES); the drafter's own time is not in it.
2. The same of the engine, where samples bring earlier responses to their prompt, and where they do not.
3. Cost of a step at contexts of 1k to 32k, and memory use.
4. Cost of a step of the engine while 64 requests with prompts of their own, 8K tokens each, come at once.
Peers: suffix decoding of arctic-inference (built into .venv-peers at the first run), vLLM's n-gram proposer,
and a suffix automaton of Python dicts. Texts: 300 questions of GSM8K with the solutions of four models, 1500
others with their answers in a row (bench/texts_gsm8k.jsonl.gz), the Python standard library, and rollouts of
the tiny RL run (bench/rollouts_tiny.jsonl.gz).
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from bars import ROOT, bar, canvas, finish, parser_of, save

PEERS = ROOT / ".venv-peers"
ARCTIC = "arctic-inference==0.3.0"
RUNNING = 16
PAYS = 1.05  # drafting always pays from this speed
START = 64  # tokens of a text that has no prompt of its own
CONTEXTS = (1024, 4096, 32768)
LENGTHS = (4, 8)
CROWD, CROWD_PROMPT = 64, 8192  # requests at once, and tokens of each one's own prompt
TIMED_AT = (1000, 2000, 4000, 8000, 16000, 32000)
Corpus = list[tuple[np.ndarray, list[np.ndarray]]]  # prompts with their outputs


class Ours:
    def __init__(self, k: int, share: bool = True, free: bool = False):
        from ascend_rl.speculation.sam import SamDrafter

        self.drafter = SamDrafter(k, share_groups=share, **({"worth": 0.0} if free else {}))
        self.propose, self.end = self.drafter.propose, self.drafter.end

    def bytes(self) -> int:
        return self.drafter.used_bytes


class Proposer:
    """SamProposer on the server's batch, as a model runner calls it."""

    def __init__(self, k: int, graphs: bool = False, earlier: Corpus = ()):
        from ascend_rl.speculation.sam_decoding import SamProposer

        self.proposer, self.graph_tokens = SamProposer(k, 1 << 30), 1 << 30 if graphs else None
        self.earlier, self.requests = earlier, {}

    def request(self, name: str) -> SimpleNamespace:
        """What the runner knows of a request; it brings the earlier responses to its prompt, if there are."""
        from ascend_rl.speculation.sam_history import KEY

        prompt, responses = self.earlier[int(name.split("/")[0])] if self.earlier else ((), ())
        texts = [np.concatenate([prompt, response]).astype(np.int32).tobytes() for response in responses]
        return SimpleNamespace(sampling_params=SimpleNamespace(
            frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_p=0.0, logit_bias=None,
            bad_words_token_ids=None,
            min_tokens=0, max_tokens=1 << 30, extra_args={KEY: [(len(prompt), text) for text in texts]},
        ))  # fmt: skip

    def propose_all(self, running: list[list]) -> list[list[int]]:
        batch = SimpleNamespace(
            req_ids=[request for request, *_ in running],
            token_ids_cpu=Texts([text for _, text, *_ in running]),
            num_prompt_tokens=[prompt for _, _, prompt, *_ in running],
            num_tokens_no_spec=[n for *_, n, _ in running],
        )
        self.requests = {name: self.requests.get(name) or self.request(name) for name in batch.req_ids}
        sampled = [[0] * emitted for *_, emitted in running]  # only their number matters
        return self.proposer.propose(batch, self.requests, sampled, self.graph_tokens)

    def end(self, request: str) -> None:
        pass  # the proposer notices


class Texts(list):
    """Texts by row, indexed as the runner's array of tokens."""

    def __getitem__(self, place: tuple):
        row, columns = place
        return super().__getitem__(row)[columns]


class Arctic:
    """As vLLM's SuffixDecodingProposer calls it; ``free``: the longest possible drafts, deeper trees."""

    def __init__(self, k: int, share: bool = True, free: bool = False):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.k, self.depth, self.seen = k, 64 if free else 24, {}
        self.factor, self.least = (1e6, 0.0) if free else (1.0, 0.1)
        self.cache = SuffixDecodingCache(self.depth, 10_000 if share else 0)

    def propose(self, request: str, tokens: np.ndarray, prompt_tokens: int) -> list[int]:
        if request not in self.seen:
            self.cache.start_request(request, tokens[:prompt_tokens])
            self.seen[request] = prompt_tokens
        if len(tokens) > self.seen[request]:
            self.cache.add_active_response(request, tokens[self.seen[request] :])
            self.seen[request] = len(tokens)
        return self.cache.speculate(
            request, tokens[-self.depth :], self.k, self.factor, min_token_prob=self.least
        ).token_ids

    def end(self, request: str) -> None:
        self.cache.stop_request(request)

    def bytes(self) -> int:
        return sum(tree.estimate_memory() for tree in self.cache._local_trees.values())


class NGram:
    """vLLM's proposer without its batch: the longest match of ``least`` to ``most`` tokens."""

    def __init__(self, k: int, least: int = 1, most: int = 8):
        from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

        self.find, self.k, self.least, self.most = (
            _find_longest_matched_ngram_and_propose_tokens,
            k,
            least,
            most,
        )

    def propose(self, request: str, tokens: np.ndarray, prompt_tokens: int) -> np.ndarray:
        return self.find(tokens, self.least, self.most, 1 << 20, self.k)

    def end(self, request: str) -> None:
        pass

    def bytes(self) -> int:
        return 0


class DictAutomaton:
    """The textbook suffix automaton, a dict per state, one per request; drafts the latest continuation."""

    def __init__(self, k: int):
        self.k, self.requests = k, {}

    def propose(self, request: str, tokens: np.ndarray, prompt_tokens: int) -> list[int]:
        empty = {"edges": [{}], "link": [-1], "len": [0], "next": [-1], "at": 0, "seen": 0}
        automaton = self.requests.setdefault(request, empty)
        for token in tokens[automaton["seen"] :].tolist():
            self.extend(automaton, token)
        automaton["seen"] = len(tokens)
        edges, link, latest, state, draft = *(automaton[name] for name in ("edges", "link", "next", "at")), []
        while state > 0 and latest[state] < 0:
            state = link[state]
        while state > 0 and latest[state] >= 0 and len(draft) < self.k:
            draft.append(latest[state])
            state = edges[state][latest[state]]
        return draft

    @staticmethod
    def extend(automaton: dict, token: int) -> None:
        edges, link, length, latest, at = (automaton[name] for name in ("edges", "link", "len", "next", "at"))
        p = at
        while p > 0 and latest[p] != token:
            latest[p] = token
            p = link[p]
        new, p = len(edges), at
        edges.append({}), link.append(0), length.append(length[at] + 1), latest.append(-1)
        while p >= 0 and token not in edges[p]:
            edges[p][token] = new
            p = link[p]
        if p >= 0:
            q = edges[p][token]
            if length[q] == length[p] + 1:
                link[new] = q
            else:
                clone = len(edges)
                edges.append(dict(edges[q])), link.append(link[q])
                length.append(length[p] + 1), latest.append(latest[q])
                link[q] = link[new] = clone
                while p >= 0 and edges[p].get(token) == q:
                    edges[p][token] = clone
                    p = link[p]
        automaton["at"] = new

    def end(self, request: str) -> None:
        del self.requests[request]

    def bytes(self) -> int:
        (automaton,) = self.requests.values()
        lists = [automaton[name] for name in ("edges", "link", "len", "next")]
        numbers = 28 * 3 * len(lists[0])
        return sum(map(sys.getsizeof, lists)) + sum(map(sys.getsizeof, automaton["edges"])) + numbers


def decode(corpus: Corpus, drafter) -> tuple[float, float, float]:
    """Tokens and drafted tokens per step, mean over all requests of a server that takes them in order, and
    the time without drafts over the time with them, for the same batches."""
    from ascend_rl.speculation.bs_threshold_for_spec_decode import step_time
    from ascend_rl.speculation.sam_options import STEP_TIMES

    queue = [
        (f"{i}/{j}", np.concatenate([prompt, output]).astype(np.int32), len(prompt))
        for i, (prompt, outputs) in enumerate(corpus)
        for j, output in enumerate(outputs)
    ][::-1]
    running, ended, steps, tokens, drafted, plain_time, time_taken = [], [], 0, 0, 0, 0.0, 0.0
    while queue or running:
        while queue and len(running) < RUNNING:
            request, text, prompt_tokens = queue.pop()
            running.append([request, text, prompt_tokens, prompt_tokens + 1, 1])  # prefill: one token
        if hasattr(drafter, "propose_all"):
            # What a step has ended is in the batch until the next one.
            drafts = drafter.propose_all([*ended, *running])[len(ended) :]
        else:
            drafts = [drafter.propose(r, text[:n], prompt) for r, text, prompt, n, _ in running]
        time_taken += step_time(STEP_TIMES, len(running) + sum(map(len, drafts)))
        plain = step_time(STEP_TIMES, len(running)) / len(running)
        for entry, draft in zip(running, drafts, strict=True):
            request, text, _, n, _ = entry
            follows = text[n : n + len(draft)]
            right = np.asarray(draft[: len(follows)]) == follows
            kept = len(right) if right.all() else int(right.argmin())
            entry[3] = min(n + kept + 1, len(text))
            entry[4] = entry[3] - n
            plain_time += plain * entry[4]
            steps, tokens, drafted = steps + 1, tokens + entry[3] - n, drafted + len(draft)
            if entry[3] == len(text):
                drafter.end(request)
        ended = [entry for entry in running if entry[3] == len(entry[1])]
        running = [entry for entry in running if entry[3] < len(entry[1])]
    return tokens / steps, drafted / steps, plain_time / time_taken


def with_earlier(corpora: dict[str, Corpus], lengths) -> dict[str, list]:
    """What the engine does with earlier responses to each prompt and without, where samples are spread.

    For want of a recording over epochs, the first HISTORY samples of a prompt stand for its responses of an
    earlier epoch; the server then runs the next one or all others.
    """
    from ascend_rl.speculation.sam_options import HISTORY

    found = {}
    for name, groups in corpora.items():
        if len(groups[0][1]) <= HISTORY:
            continue
        of_prompt: dict[bytes, tuple] = {}
        for prompt, outputs in groups:
            of_prompt.setdefault(prompt.tobytes(), (prompt, []))[1].extend(outputs)
        corpus = list(of_prompt.values())
        earlier = [(prompt, outputs[:HISTORY]) for prompt, outputs in corpus]
        for samples in (1, len(corpus[0][1]) - HISTORY):
            now = [(prompt, outputs[HISTORY : HISTORY + samples]) for prompt, outputs in corpus]
            for k in lengths:
                found[f"{name}|{samples}|without|{k}"] = decode(now, Proposer(k))
                found[f"{name}|{samples}|with|{k}"] = decode(now, Proposer(k, earlier=earlier))
    return found


def step_times(make, text: np.ndarray, runs: int) -> dict:
    """Times in us of steps that add one token to ``text`` and draft, and of their parts at its end.

    All runs do the same work. The minimum is the call's own time; anything above it is machine noise.
    """
    times = np.empty((runs, len(text) - START))
    drafts, updates, clock = [], [], time.perf_counter_ns
    late = len(text) - min(4096, len(text) // 2)
    for run in range(runs):
        drafter = make()
        for n in range(START, len(text)):
            tokens = text[: n + 1]
            begin = clock()
            drafter.propose("a", tokens, START)
            times[run, n - START] = clock() - begin
        for _ in range(2000):
            begin = clock()
            drafter.propose("a", text, START)
            drafts.append(clock() - begin)
        used = drafter.bytes()
        drafter = make()
        for n in range(START, late, 256):
            drafter.propose("a", text[:n], START)
        drafter.propose("a", text[:late], START)
        chunks = []
        for n in range(late + 64, len(text) + 1, 64):
            begin = clock()
            drafter.propose("a", text[:n], START)
            chunks.append((clock() - begin) / 64)
        updates.append(chunks)
    own = times.min(axis=0) / 1e3
    return {
        "draft_us": float(np.median(drafts)) / 1e3,
        "update_us": float(np.min(updates, axis=0).mean()) / 1e3,
        "p999_us": float(np.quantile(own, 0.999)),
        "worst_us": float(own.max()),
        "worst_seen_us": float(times.max()) / 1e3,
        "bytes_per_token": used / len(text),
        "step_us": {n: float(np.median(own[n - 512 : n])) for n in TIMED_AT if n <= len(own)},
    }


def crowd(text: np.ndarray, quick: bool) -> dict[str, float]:
    """Steps of the engine's drafter from when CROWD requests come at once until it knows all their prompts.

    Each prompt is the text with the tokens exchanged for others: it repeats as the text does, but shares
    nothing with other prompts. The times of a step are each the least of several runs.
    """
    prompt = text[:CROWD_PROMPT]
    rows = [(prompt + row * 20_000).astype(np.int32) for row in range(8 if quick else CROWD)]
    times: list[list[float]] = []
    for _ in range(2 if quick else 4):
        drafter, times = Proposer(8), [*times, []]
        seen = drafter.proposer.drafter.seen
        batch = [[str(row), own, len(own), len(own), 1] for row, own in enumerate(rows)]
        while any(seen(name) < len(prompt) for name, *_ in batch):
            begin = time.perf_counter_ns()
            drafter.propose_all(batch)
            times[-1].append((time.perf_counter_ns() - begin) / 1e6)
    own = np.min(times, axis=0)
    return {
        "requests": len(rows),
        "tokens": len(prompt),
        "steps": len(own),
        "median_ms": float(np.median(own)),
        "worst_ms": float(own.max()),
    }


def stalls(seconds: float) -> tuple[float, float]:
    """99.9th percentile and maximum of the time between two consecutive clock readings, in us."""
    clock, gaps, last = time.perf_counter_ns, [], time.perf_counter_ns()
    end = last + int(seconds * 1e9)
    while last < end:
        now = clock()
        gaps.append(now - last)
        last = now
    return float(np.quantile(gaps, 0.999)) / 1e3, max(gaps) / 1e3


def read_corpora(quick: bool) -> dict[str, Corpus]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    with gzip.open(ROOT / "bench" / "texts_gsm8k.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    rows, solved = rows[: 150 if quick else 1500], rows[1500 : 1530 if quick else None]
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    budget, learned = (4_096, 60_000) if quick else (32_768, 600_000)  # tokens, characters
    code = "\n".join(path.read_text(errors="ignore") for path in library)[:4_000_000]
    row = "\n\n".join(f"{r['question']}\n{r['answer']}" for r in rows + solved)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=16_000, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([row, code[:learned]], trainer)

    def encode(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text).ids, dtype=np.int32)

    corpora = {
        "GSM8K, 4 models": [
            (encode(r["question"]), [encode("\n" + text) for text in r["solutions"]]) for r in solved
        ],
        "tiny RL, n 8": read_rollouts(ROOT / "bench" / "rollouts_tiny.jsonl.gz", 3 if quick else 24),
    }
    for name, text in (("GSM8K", row), ("code", code[learned:])):
        tokens = encode(text[: 8 * budget])[:budget]
        for context in CONTEXTS:
            texts = [tokens[i : i + context] for i in range(0, len(tokens) - context + 1, context)]
            if texts:
                corpora[f"{name}, {context // 1024}k"] = [(t[:START], [t[START:]]) for t in texts]
    return corpora


def read_rollouts(path: Path, steps: int) -> Corpus:
    """Prompts with their samples; tokens are characters, <think>, </think> and an end token."""
    numbers: dict[str, int] = {"": 0}
    corpus: Corpus = []

    def encode(text: str) -> list[int]:
        return [
            numbers.setdefault(piece, len(numbers)) for piece in re.findall(r"</?think>|.", text, re.DOTALL)
        ]

    with gzip.open(path, "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["step"] <= steps]
    for (prompt, _), group in groupby(rows, lambda row: (row["input"], row["step"])):
        corpus.append((np.array(encode(prompt)), [np.array([*encode(row["output"]), 0]) for row in group]))
    return corpus


def in_peers(what: str, data) -> dict:
    """Run one part with arctic-inference, in an environment of its own."""
    python = PEERS / "bin" / "python"
    uv = Path(sys.executable).parent / "uv"
    if not list(PEERS.glob("lib/*/site-packages/arctic_inference")):
        print(f"building {ARCTIC} into {PEERS.name}, one or two minutes")
        subprocess.run([uv, "venv", "-q", "--clear", "-p", sys.executable, PEERS], check=True)
        subprocess.run(
            [uv, "pip", "install", "-q", "-p", python, "--no-deps", ARCTIC, f"numpy=={np.__version__}"],
            check=True,
        )
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        pickle.dump(data, file)
        file.flush()
        done = subprocess.run(
            [python, __file__, "--peer", what, file.name], check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(done.stdout)


def accepted(corpora: dict[str, Corpus], makers: dict, lengths) -> dict:
    return {
        f"{name}|{drafter}|{k}": decode(corpus, make(k))
        for name, corpus in corpora.items()
        for k in lengths
        for drafter, make in makers.items()
    }


ARCTIC_MAKERS = {
    "arctic, own text": lambda k: Arctic(k, share=False),
    "arctic, own text, free": lambda k: Arctic(k, share=False, free=True),
    "arctic": Arctic,
    "arctic, free": lambda k: Arctic(k, free=True),
}


def peer(what: str, path: str) -> None:
    with open(path, "rb") as file:
        data = pickle.load(file)
    if what == "accepted":
        print(json.dumps(accepted(data["corpora"], ARCTIC_MAKERS, data["lengths"])))
    else:
        print(
            json.dumps(
                {n: step_times(lambda: Arctic(8), text, data["runs"]) for n, text in data["texts"].items()}
            )
        )


def timed_texts(corpora: dict[str, Corpus]) -> dict[str, np.ndarray]:
    """Real text, text that never repeats, and an automaton's worst case: a long loop that ends."""
    length = sum(len(outputs[0]) + START for _, outputs in corpora["code, 1k"])
    rng = np.random.default_rng(0)
    texts = {}
    for name in ("code", "GSM8K"):
        rows = [np.concatenate([prompt, *outputs]) for prompt, outputs in corpora[f"{name}, 1k"]]
        texts[name] = np.concatenate(rows)[:length]
    texts["noise"] = rng.integers(0, 50_000, length)
    texts["a loop that ends"] = np.append(np.zeros(length - 2_000), rng.integers(0, 1_000, 2_000))
    return {name: np.ascontiguousarray(text, dtype=np.int32) for name, text in texts.items()}


def draw(tokens: dict, times: dict, multi: list[str]) -> None:
    figure, axes = canvas(1, len(multi) + 1, figsize=(5 * len(multi) + 5, 4))
    for axis, corpus in zip(axes, multi, strict=False):
        for drafter in dict.fromkeys(key.split("|")[1] for key in tokens):
            points = [value for key, value in tokens.items() if key.startswith(f"{corpus}|{drafter}|")]
            axis.plot([d for _, d, _ in points], [t for t, *_ in points], "o-", label=drafter, markersize=4)
        axis.set(title=corpus, xlabel="drafted tokens per step", ylabel="tokens per step")
    axes[0].legend(fontsize=7)
    for drafter, by_text in times.items():
        steps = by_text["code"]["step_us"]
        axes[-1].loglog([int(n) for n in steps], list(steps.values()), "o-", label=drafter, markersize=4)
    axes[-1].set(title="one token in, one draft (code)", xlabel="tokens of context", ylabel="us")
    axes[-1].legend(fontsize=7)
    save(figure, "sam_decoding")


def main() -> int:
    parser = parser_of(__doc__, "less text, one draft length, under a minute")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        peer(*arguments.peer)
        return 0

    quick = arguments.quick
    corpora = read_corpora(quick)
    lengths, runs = (LENGTHS[1:], 2) if quick else (LENGTHS, 6)
    makers = {
        "engine": Proposer,
        "engine, graphs": lambda k: Proposer(k, graphs=True),
        "ours": Ours,
        "ours, free": lambda k: Ours(k, free=True),
        "ours, own text": lambda k: Ours(k, share=False),
        "n-gram of vLLM": NGram,
        "dict automaton": DictAutomaton,
    }
    tokens = accepted(corpora, makers, lengths) | in_peers(
        "accepted", {"corpora": corpora, "lengths": lengths}
    )
    drafters = [*makers, *ARCTIC_MAKERS]
    shown = {
        "engine, graphs": "graphs",
        "ours, free": "free",
        "ours, own text": "own",
        "n-gram of vLLM": "n-gram",
        "dict automaton": "dict",
        "arctic, own text": "own",
        "arctic, own text, free": "own, free",
        "arctic, free": "free",
    }
    for k in lengths:
        print(f"\ntokens per step / drafted, {k} tokens a draft at most")
        print(" " * 16 + "".join(f"{shown.get(d, d):>14}" for d in drafters))
        for corpus in corpora:
            cells = (tokens[f"{corpus}|{drafter}|{k}"] for drafter in drafters)
            print(f"{corpus:<16}" + "".join(f"{f'{t:.3f} / {d:.2f}':>14}" for t, d, _ in cells))
        print(f"speed over no speculation, {k} tokens a draft at most")
        for corpus in corpora:
            cells = (tokens[f"{corpus}|{drafter}|{k}"] for drafter in drafters)
            print(f"{corpus:<16}" + "".join(f"{speed:>14.3f}" for *_, speed in cells))

    earlier = with_earlier(corpora, lengths)
    print(
        "\nthe engine with and without the earlier responses to each prompt: tokens per step / drafted, speed"
    )
    for key in [key for key in earlier if "|with|" in key]:
        name, samples, _, k = key.split("|")
        cells = (earlier[key.replace("with|", f"{kind}|")] for kind in ("without", "with"))
        print(f"{name:<16} {samples} a prompt, {k} tokens a draft" + "".join(
            f"{f'{t:.3f} / {d:.2f}, {speed:.3f}':>26}" for t, d, speed in cells
        ))  # fmt: skip

    texts = timed_texts(corpora)
    times = {
        "ours": {name: step_times(lambda: Ours(8), text, runs) for name, text in texts.items()},
        "arctic": in_peers("times", {"texts": texts, "runs": 2}),
    }
    for name, make in (("n-gram of vLLM", NGram), ("dict automaton", DictAutomaton)):
        times[name] = {"code": step_times(lambda make=make: make(8), texts["code"], 1)}
    gap = stalls(1 if quick else 5)
    print(
        f"\ntimes in us at {len(texts['code'])} tokens; of a call: its least of {runs} runs. The machine "
        f"alone: 99.9% of its pauses below {gap[0]:.2f} us, the longest {gap[1]:.0f} us"
    )
    columns = ("update_us", "draft_us", "p999_us", "worst_us", "worst_seen_us", "bytes_per_token")
    print(" " * 34 + "".join(f"{column:>17}" for column in columns))
    for drafter, by_text in times.items():
        for name, row in by_text.items():
            print(f"{drafter:<16}{name:<18}" + "".join(f"{row[column]:>17.2f}" for column in columns))

    at_once = crowd(texts["code"], quick)
    print(
        "\n{requests} requests with prompts of their own, {tokens} tokens each, together: ".format(**at_once)
        + "{steps} steps, ms per step: {median_ms:.2f}, worst {worst_ms:.2f}".format(**at_once)
    )

    multi = [name for name in corpora if len(corpora[name][0][1]) > 1]
    peers = [drafter for drafter in drafters if not drafter.startswith(("ours", "engine"))]
    alone = [drafter for drafter in peers if drafter not in ("arctic", "arctic, free")]
    bars = []
    for what, drafter, rivals, bound, names in (
        ("tokens per step, longest drafts, over the best peer", "ours, free", peers, 1.0, corpora),
        ("tokens per step, as set by default, over arctic", "ours", ["arctic"], 1.0, corpora),
        ("tokens per step, shared, over the best peer on own text", "ours", alone, 1.25, multi),
    ):
        for name in names:
            ratio = min(
                tokens[f"{name}|{drafter}|{k}"][0] / max(tokens[f"{name}|{rival}|{k}"][0] for rival in rivals)
                for k in lengths
            )
            bars.append(bar(f"{what}: {name}", ratio, "x", f">= {bound}"))
    for name in corpora:
        rows = {d: [tokens[f"{name}|{d}|{k}"] for k in lengths] for d in drafters}
        always = [(t, speed) for t, _, speed in rows["ours"]]
        pays = [e[0] / t for e, (t, speed) in zip(rows["engine"], always, strict=True) if speed >= PAYS]
        if pays:
            what = f"tokens per step, the engine over drafting always, where that pays: {name}"
            bars.append(bar(what, min(pays), "x", ">= 0.95"))
        for drafter in ("engine", "engine, graphs"):
            slowest = min(speed for *_, speed in rows[drafter])
            bars.append(bar(f"speed of the {drafter}: {name}", slowest, "x", ">= 0.98"))
        best = [max(rows[peer][i][2] for peer in peers) for i in range(len(lengths))]
        ratio = min(e[2] / b for e, b in zip(rows["engine"], best, strict=True))
        bars.append(bar(f"speed, the engine over the best peer: {name}", ratio, "x", ">= 0.98"))
    for name in dict.fromkeys(key.split("|")[0] for key in earlier):
        ratio = min(earlier[f"{name}|1|with|{k}"][0] / earlier[f"{name}|1|without|{k}"][0] for k in lengths)
        what = f"tokens per step, with earlier responses over without, one sample per prompt: {name}"
        bars.append(bar(what, ratio, "x", ">= 1.2"))
    mine = times["ours"]
    for what, column, unit, bound, names in (
        ("update per token", "update_us", "us", 1.0, ("code", "GSM8K")),
        ("draft, median", "draft_us", "us", 2.0, ("code", "GSM8K")),
        ("step, 99.9%", "p999_us", "us", 50, mine),
        ("step, worst", "worst_us", "us", 1000, mine),
        ("memory", "bytes_per_token", "bytes per token", 100, mine),
    ):
        value = max(mine[name][column] for name in names)
        bars.append(bar(what, value, unit, f"<= {bound}"))
    what = f"step while {at_once['requests']} prompts of {at_once['tokens']} tokens arrive together, median"
    bars.append(bar(what, at_once["median_ms"], "ms", "<= 5"))
    draw(tokens, times, multi)
    data = {"tokens_a_step": tokens, "with_earlier": earlier, "times": times, "machine_pauses_us": gap,
            "at_once": at_once}  # fmt: skip
    return finish("sam_decoding", bars, **data)


if __name__ == "__main__":
    sys.exit(main())
