"""An engine that gives requests up, and one that continues them, each the job of a process of its own."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace

from npu_ground import make_llm

from ascend_rl.rollout.moved_kv import CONNECTOR, PARAMETER, Depot, place

NEW = 40  # tokens of each response
LENGTHS = (5, 107, 108, 109, 300)  # at 20 tokens, with and without a full last block of 128
MODULE, _, NAME = CONNECTOR.rpartition(".")


def make_engine(path: str, directory: str | None, **options):
    """Without a directory, an engine as it is without the feature."""
    transfer = {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"directory": directory},
    }
    return make_llm(path, **options, **({"kv_transfer_config": transfer} if directory else {}))


def sampling(tokens: int, **more):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, logprobs=0, **more)


def answer(output) -> dict:
    logprobs = zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
    return {
        "tokens": list(output.outputs[0].token_ids),
        "log_probs": [entry[token].logprob for entry, token in logprobs],
        "cached": output.num_cached_tokens,
    }


def stay(path: str, prompts: list[list[int]], **options) -> list[dict]:
    """The answers of requests that do not move."""
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = make_engine(path, None, **options).generate(requests, sampling(NEW), use_tqdm=False)
    return [answer(output) for output in outputs]


def give_up(path: str, directory: str, prompts: list[list[int]], new: int, cut: int, **options) -> list[dict]:
    """Answers up to when each has at least ``cut`` tokens; then all are aborted, to move with their KV."""
    llm = make_engine(path, directory, **options)
    engine, names, found = llm.llm_engine, [f"movable/{i}/0" for i in range(len(prompts))], {}
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling(new))
    while len(found) < len(prompts) or min(len(one["tokens"]) for one in found.values()) < cut:
        found |= {output.request_id: answer(output) for output in engine.step()}
    for name in names:
        Path(directory, place(name)).mkdir()
    engine.abort_request(names)
    while not list(Path(directory, place(names[-1])).glob("*.kv")):  # the next step, or the one after it
        engine.engine_core.engine_core.step_fn()
    return [found[name] for name in names]


def go_on(path: str, directory: str, parts: list[list], known: list[int] = (), **options) -> dict:
    """Answers of requests that have moved here, and the prompt tokens that the engine computed for them.

    Args:
        parts: of each request (prompt and tokens so far, its ``kv_transfer_params`` or None, tokens left).
        known: a prompt that is in the prefix cache already.
    """
    llm = make_engine(path, directory, **options)
    if known:
        llm.generate([{"prompt_token_ids": known}], sampling(1), use_tqdm=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    first, preempted, steps = {}, [], []
    schedule, preempt = scheduler.schedule, scheduler._preempt_request

    def watched():
        """Counts what is to be computed up to a request's first new token."""
        output = schedule()
        steps.append(output.total_num_scheduled_tokens)
        for name, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            after = request.num_computed_tokens
            if not request.num_output_tokens:  # a step ahead, a token of the answer is computed already
                prompt = min(after, request.num_prompt_tokens) - (after - tokens)
                first[name] = first.get(name, 0) + max(0, prompt)
        return output

    def counted(request, *args):
        preempted.append(request.request_id)
        return preempt(request, *args)

    scheduler.schedule, scheduler._preempt_request = watched, counted
    params = [sampling(left, extra_args={"kv_transfer_params": kv} if kv else None) for _, kv, left in parts]
    requests = [{"prompt_token_ids": tokens} for tokens, _, _ in parts]
    outputs = llm.generate(requests, params, use_tqdm=False)
    return {
        "answers": [answer(output) for output in outputs],
        "computed": [first[output.request_id] for output in outputs],
        "preempted": len(preempted),
        "steps": sum(map(bool, steps)),
    }


def prompts_of(lengths) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(13) for _ in range(length)] for length in lengths]


def move(
    run,
    path: Path,
    base: Path,
    workers=1,
    spoil=None,
    lose=None,
    cut=20,
    target=(),
    second=go_on,
    known=270,
    **options,
) -> SimpleNamespace:
    """Requests of several lengths at once, from one engine to another.

    Args:
        run: calls a function in a process of its own.
        base: for the KV.
        target: options of the second engine alone.
        second: the job of the second engine.
        known: so many tokens of the last prompt are in its prefix cache.
        spoil: what to do to the directory of each request before the target takes it.
        lose: the same, after the target's front end has taken it.
    """
    prompts = prompts_of(LENGTHS)
    source, receiver = (Depot(base, name, {}, workers) for name in ("source", "target"))
    source._own()  # else the target's start would take it for that of a process that died
    parts = run(give_up, str(path), str(source.directory), prompts, NEW, cut, **options)
    moves = []
    for index, (prompt, part) in enumerate(zip(prompts, parts, strict=True)):
        directory = source.directory / place(f"movable/{index}/0")
        assert len(list(directory.glob("*.kv"))) == workers
        (directory / "about.json").write_text(source._about(None))
        if spoil:
            spoil(directory)
        kv = asyncio.run(receiver.take(str(directory), None))
        if lose:
            lose(Path(kv[PARAMETER]["directory"]))
        moves.append([prompt + part["tokens"], kv, NEW - len(part["tokens"])])
    found = run(
        second, str(path), str(receiver.directory), moves, prompts[-1][:known], **options | dict(target)
    )
    left = [path for path in base.rglob("*") if path.name.endswith((".kv", ".part", "about.json"))]
    for depot in (source, receiver):
        depot.clear()
    return SimpleNamespace(
        prompts=prompts,
        sent=sum(kv is not None for _, kv, _ in moves),
        tokens=[a["tokens"] + b["tokens"] for a, b in zip(parts, found["answers"], strict=True)],
        log_probs=[a["log_probs"] + b["log_probs"] for a, b in zip(parts, found["answers"], strict=True)],
        lengths=[len(tokens) for tokens, _, _ in moves],
        left=left,
        **{key: value for key, value in found.items() if key != "answers"},
    )


def check(found: SimpleNamespace, stayed: list[dict], model: Path) -> None:
    """What moved answers as what stayed and as Hugging Face, and nothing is left of its KV."""
    assert found.tokens == [one["tokens"] for one in stayed]
    difference = worst(found.log_probs, [one["log_probs"] for one in stayed])
    error = worst(found.log_probs, hugging_face(model, found.prompts, found.tokens))
    print(
        f"\ncomputed {found.computed} of {found.lengths}; preempted {found.preempted}; log-probs differ by "
        f"{difference:.1e}, from Hugging Face by {error:.1e}"
    )
    assert max(difference, error) < 1e-5
    assert not found.left


def worst(a: list[list[float]], b: list[list[float]]) -> float:
    """The largest difference of a log-prob."""
    rows = zip(a, b, strict=True)
    return max(abs(x - y) for row_a, row_b in rows for x, y in zip(row_a, row_b, strict=True))


def hugging_face(path: Path, prompts: list[list[int]], tokens: list[list[int]]) -> list[list[float]]:
    """Log-probs of the tokens, without a cache."""
    import torch
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), []
    for prompt, answer in zip(prompts, tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1)[torch.arange(len(answer)), answer].tolist())
    return found
