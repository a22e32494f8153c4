"""A Qwen3 small enough for a laptop, with its tokenizer and a verifiable task, all made locally.

The task is addition of two numbers below 100. A response first writes the sum lowest digit first, so that a
carry depends only on digits already written, and then the answer: ``<think>231</think>132`` for ``47+85``.
The reward is 1 if the text after ``</think>`` is exactly the sum, else 0. Operand pairs are split once: a
held-out tenth never occurs in the warm start or in RL, so the validation reward measures adding, not recall.

A random model never answers correctly, and RL needs a first success to learn from. As with a real base model,
a short supervised start teaches the skill but not the habit: most demonstrations forget the carries, so
the model can add but usually does not. RL has to find out which of the two is rewarded. What is written to
``--out`` depends only on the arguments (and on the CPU's floating point).

    python -m ascend_rl.tiny --out data/tiny                  # 2 layers, about 20 s on 2 cores
    python -m ascend_rl.tiny --out data/tiny_moe --moe        # the same as a Qwen3-MoE, 8 experts per layer
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import random
import shutil
import sys
from pathlib import Path

from ascend_rl.settings.numbers import real, whole

DIGITS_MAX = 99
HELD_OUT_SHARE = 0.1
CARELESS_SHARE = 0.7
DATA_SOURCE = "tiny/addition"
MARKER = "arguments.txt"


def respond(total: str) -> str:
    return f"<think>{total[::-1]}</think>{total}"


def careful(a: int, b: int) -> str:
    """The correct response.

    >>> careful(47, 85)
    '<think>231</think>132'
    """
    return respond(str(a + b))


def careless(a: int, b: int) -> str:
    """The response that adds each digit by itself, correct only where nothing is carried.

    >>> careless(47, 85), careless(12, 34) == careful(12, 34)
    ('<think>22</think>22', True)
    """
    digits = [(a // place + b // place) % 10 for place in (10, 1)]
    return respond(f"{digits[0]}{digits[1]}" if digits[0] else f"{digits[1]}")


def compute_score(data_source, solution_str: str, ground_truth: str, extra_info=None, **kwargs) -> dict:
    """verl's reward hook: 1 if the text after the last ``</think>`` is exactly the ground truth, else 0."""
    _, closed, answer = solution_str.rpartition("</think>")
    correct = float(bool(closed) and answer.strip() == str(ground_truth))
    return {"score": correct, "acc": correct}


def operand_pairs(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All operand pairs as (training, held out), disjoint, shuffled by ``seed``."""
    pairs = [(a, b) for a in range(DIGITS_MAX + 1) for b in range(DIGITS_MAX + 1)]
    random.Random(seed).shuffle(pairs)
    held_out = int(len(pairs) * HELD_OUT_SHARE)
    return pairs[held_out:], pairs[:held_out]


def newline() -> str:
    """The token that verl 0.9's agent loop asks a Qwen tokenizer for; earlier ones need none."""
    try:
        major, minor = importlib.metadata.version("verl").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return ""
    return "\n" if (int(major), int(minor)) >= (0, 9) else ""


def make_tokenizer(even: bool = False):
    """A character tokenizer with Qwen3's chat and thinking tokens; ``even``: and a space if they are odd."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = [*"0123456789+", *newline(), *(" " * (even and bool(newline())))]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    return fast


def make_model(tokenizer, seed: int, moe: bool = False, hidden_size: int = 64, layers: int = 2):
    """A random fp32 Qwen3ForCausalLM, or Qwen3MoeForCausalLM (8 experts, 2 per token), for ``tokenizer``."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    common = {
        "vocab_size": len(
            tokenizer
        ),  # verl masks logits beyond the tokenizer's vocabulary in vLLM, but not in the trainer
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if not moe:
        return Qwen3ForCausalLM(Qwen3Config(**common))
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 2 * hidden_size,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts))


def encode(tokenizer, pairs: list[tuple[int, int]], responses: list[str]):
    """Prompts and responses as (input_ids [N, T], labels [N, T]); labels are -100 outside the response."""
    import torch

    prompts = [
        tokenizer.apply_chat_template(chat(a, b), add_generation_prompt=True, return_dict=False)
        for a, b in pairs
    ]
    answers = [tokenizer.encode(response) + [tokenizer.eos_token_id] for response in responses]
    width = max(len(p) + len(r) for p, r in zip(prompts, answers, strict=True))
    input_ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), -100)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        input_ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return input_ids, labels


def chat(a: int, b: int) -> list[dict]:
    return [{"role": "user", "content": f"{a}+{b}"}]


def response_probability(model, input_ids, labels):
    """Probability of each whole response when sampling at temperature 1: [N]."""
    import torch

    with torch.no_grad():
        log_probs = model(input_ids=input_ids).logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    chosen = log_probs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(targets < 0, 0).sum(-1).exp()


def warm_start(model, tokenizer, pairs, seed: int, until: float, max_steps: int = 2000) -> float:
    """Supervised training on mostly careless demonstrations; returns the share of careful answers.

    Stops when, on pairs with a carry, the careful and the careless response together have a probability of at
    least ``until``, and the careful one at least half its share of the demonstrations.

    Raises:
        RuntimeError: not reached in ``max_steps``.
    """
    import torch
    from tqdm import tqdm

    rng = random.Random(seed)
    shown = [(careless if rng.random() < CARELESS_SHARE else careful)(a, b) for a, b in pairs]
    input_ids, labels = encode(tokenizer, pairs, shown)
    carrying = [(a, b) for a, b in pairs if careful(a, b) != careless(a, b)][:512]
    probes = [
        encode(tokenizer, carrying, [response(a, b) for a, b in carrying]) for response in (careful, careless)
    ]
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    every_s = 0.1 if sys.stderr.isatty() else 10  # a log gets a line each time
    progress = tqdm(range(1, max_steps + 1), desc="warm start", unit="step", leave=False, mininterval=every_s)
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1, step / 20) * max(0.1, 1 - step / 350)
        rows = torch.randint(len(pairs), (128,), generator=generator)
        logits = model(input_ids=input_ids[rows]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[rows, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            right, wrong = (response_probability(model, *probe).mean().item() for probe in probes)
            progress.set_postfix(careful=f"{right:.2f}", careless=f"{wrong:.2f}")
            if right + wrong >= until and right >= (1 - CARELESS_SHARE) / 2:
                return right
    raise RuntimeError(
        f"after {max_steps} steps {right:.2f} careful and {wrong:.2f} careless, wanted {until} in all"
    )


def write_parquet(path: Path, pairs: list[tuple[int, int]], split: str) -> None:
    """Write rows in verl's format."""
    import pandas as pd

    frame = pd.DataFrame(
        {
            "data_source": DATA_SOURCE,
            "prompt": chat(a, b),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": split, "index": i},
        }
        for i, (a, b) in enumerate(pairs)
    )
    frame.to_parquet(path)


def make(out: Path, arguments: argparse.Namespace, description: str) -> None:
    """Make model, tokenizer and task in ``out``, which appears only when complete."""
    import torch

    torch.set_num_threads(1)  # as fast for a model this small, and much faster on a busy machine
    torch.manual_seed(arguments.seed)
    training, held_out = operand_pairs(arguments.seed)
    tokenizer = make_tokenizer(arguments.even)
    model = make_model(tokenizer, arguments.seed, arguments.moe)
    reached = warm_start(model, tokenizer, training, arguments.seed, arguments.warm_start)

    building = out.with_name(f".{out.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    model.save_pretrained(building / "model")
    tokenizer.save_pretrained(building / "model")
    write_parquet(building / "train.parquet", training, "train")
    write_parquet(building / "val.parquet", held_out[: arguments.validation], "validation")
    (building / MARKER).write_text(description)
    building.rename(out)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{out}: {model.config.model_type} with {parameters:,} parameters, "
        f"careful {reached:.0%} of the time; "
        f"{len(training)} training and {min(arguments.validation, len(held_out))} held-out prompts"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.tiny",
        description="Make the tiny Qwen3, its tokenizer and its task.",
        epilog="""Examples:
  python -m ascend_rl.tiny --out data/tiny
  python -m ascend_rl.tiny --out data/tiny_moe --moe

Writes model/, train.parquet and val.parquet into --out, which appears when it is complete.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to make; left alone if it is complete"
    )
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0)
    parser.add_argument(
        "--warm-start",
        type=real(high=1),
        default=0.9,
        metavar="P",
        help="stop the supervised start at this probability of a careful or careless response (0.9)",
    )
    parser.add_argument("--moe", action="store_true", help="make a Qwen3-MoE")
    parser.add_argument(
        "--even", action="store_true", help="make an even number of tokens, of which two ranks have half each"
    )
    parser.add_argument(
        "--validation", type=whole(), default=256, metavar="N", help="held-out prompts to keep"
    )
    args = parser.parse_args(argv)

    description = (
        f"seed={args.seed} warm_start={args.warm_start} validation={args.validation}{' moe' * args.moe}"
        f"{' newline' * bool(newline())}{' even' * (args.even and bool(newline()))}\n"
    )
    if not args.out.exists():
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.with_name(f".{args.out.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # wait while another first run makes it
            if not args.out.exists():
                make(args.out, args, description)
                return
    marker = args.out / MARKER
    if not marker.exists():
        parser.error(f"{args.out} exists but is not complete: remove it, or choose another --out")
    if marker.read_text() != description:
        parser.error(
            f"{args.out} was made with other arguments ({marker.read_text().strip()}): choose another --out"
        )
