"""vLLM engines in this process that count steps and drafts, and exact distributions of a tiny Qwen3."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from scipy.stats import chi2

VOCABULARY = 12


def random_model(path):
    """A Qwen3 with 12 tokens and random weights: what it says is far from certain. Returns it, in fp32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            initializer_range=0.12,
            bos_token_id=None,
            eos_token_id=0,
        )  # fmt: skip
    )
    model.save_pretrained(path)
    return model.eval()


class Engine:
    """An LLM; ``counts`` of its engine steps, drafted and accepted tokens and preemptions."""

    def __init__(self, path, **options):
        from vllm import LLM

        self.llm = LLM(
            str(path),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            **{"max_model_len": 256, "max_num_seqs": 16, "num_gpu_blocks_override": 128} | options,
        )
        self.counts = Counter()
        self.core = self.llm.llm_engine.engine_core.engine_core
        scheduler = self.core.scheduler
        step, preempt = self.core.step_fn, scheduler._preempt_request
        drafts = scheduler.make_spec_decoding_stats

        def counted_step():
            self.counts["steps"] += 1
            return step()

        def counted_drafts(stats, num_draft_tokens, num_accepted_tokens, **others):
            self.counts["drafted"] += num_draft_tokens
            self.counts["accepted"] += num_accepted_tokens
            return drafts(stats, num_draft_tokens, num_accepted_tokens, **others)

        def counted_preempt(*args):
            self.counts["preempted"] += 1
            return preempt(*args)

        self.core.step_fn, scheduler.make_spec_decoding_stats = counted_step, counted_drafts
        scheduler._preempt_request = counted_preempt

    def run(self, prompts: list[list[int]], parameters) -> list:
        """All completions in order, as vLLM's CompletionOutput; ``counts`` are of this run."""
        self.counts.clear()
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False
        )
        return [completion for output in outputs for completion in output.outputs]

    def tokens(self, prompts, parameters) -> list[list[int]]:
        return [list(completion.token_ids) for completion in self.run(prompts, parameters)]


def prompts(count: int, shortest: int = 3, longest: int = 40) -> list[list[int]]:
    """Random prompts, every other one with a repetition at its end; more of them begin with the same."""
    rng = np.random.default_rng(0)
    drawn = [rng.integers(1, VOCABULARY, rng.integers(shortest, longest)).tolist() for _ in range(count)]
    return [prompt + prompt[-4:] * 2 if i % 2 else prompt for i, prompt in enumerate(drawn)]


def processed(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Log-probs after temperature, top-k and top-p, [..., V]: written from the definitions.

    Of the tokens by falling probability, top-k keeps the first k, then top-p the fewest that have p.
    """
    logits = logits.double() / temperature
    if top_k:
        smallest = logits.sort(-1, descending=True).values[..., top_k - 1 : top_k]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    kept = probs.cumsum(-1) - probs < top_p
    logits = logits.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -torch.inf)
    return logits.log_softmax(-1)


@torch.no_grad()
def teacher_forced(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Hugging Face's logits of each token of the response, [len(response), V]."""
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]


def log_probs(completion) -> torch.Tensor:
    """The log-prob of each emitted token, as verl reads it."""
    assert len(completion.logprobs) == len(completion.token_ids)
    return torch.tensor([
        step[token].logprob
        for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ], dtype=torch.float64)  # fmt: skip


@torch.no_grad()
def exact_distributions(model, prompt: list[int], positions: int, **sampling) -> list[torch.Tensor]:
    """The distribution of each of the first output tokens, by going through all beginnings: [V] each."""
    beginnings, weights, marginals = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64), []
    for _ in range(positions):
        joint = weights[:, None] * processed(model(beginnings).logits[:, -1], **sampling).exp()
        marginals.append(joint.sum(0))
        likely = joint > 1e-7
        row, token = likely.nonzero(as_tuple=True)
        beginnings, weights = torch.cat([beginnings[row], token[:, None]], 1), joint[likely]
    return marginals


def assert_distributed(tokens: list[int], probs: torch.Tensor) -> None:
    """Chi-square test at 1e-4; tokens with less than 5 expected samples are taken together."""
    seen = np.bincount(tokens, minlength=len(probs)).astype(float)
    expected = len(tokens) * probs.numpy()
    assert not seen[expected == 0].any()
    rare = expected < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    if expected[-1] < 5:  # too few for a cell of their own
        smallest = expected[:-1].argmin()
        seen[smallest], expected[smallest] = seen[smallest] + seen[-1], expected[smallest] + expected[-1]
        seen, expected = seen[:-1], expected[:-1]
    distance = ((seen - expected) ** 2 / expected).sum()
    assert distance < chi2.ppf(1 - 1e-4, len(expected) - 1), (seen, expected)
