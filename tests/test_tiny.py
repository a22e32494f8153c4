"""ascend_rl/recipe/tiny.py: the task as defined, the tokenizer, the labels, the files and the command."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
import torch

from ascend_rl.recipe import tiny as module

EVERY_PAIR = {(a, b) for a in range(100) for b in range(100)}


@pytest.fixture(scope="module")
def tokenizer():
    return module.make_tokenizer()


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ascend_rl.tiny", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


# The task.


@pytest.mark.parametrize("seed", [0, 1])
def test_pairs_are_disjoint_and_complete(seed):
    training, held_out = module.operand_pairs(seed)
    assert len(training) == 9000 and len(held_out) == 1000
    assert set(training) | set(held_out) == EVERY_PAIR  # 10000 in all, so none occurs twice


def test_pairs_depend_on_the_seed_only():
    assert module.operand_pairs(3) == module.operand_pairs(3)
    assert set(module.operand_pairs(3)[1]) != set(module.operand_pairs(4)[1])


def test_careful_is_right_for_every_pair():
    for a, b in EVERY_PAIR:
        thought, answer = module.careful(a, b).removeprefix("<think>").split("</think>")
        assert answer == str(a + b) and thought == answer[::-1]


def test_careless_forgets_every_carry():
    """Digit by digit without carries, and without a leading zero; right exactly where nothing is carried."""
    for a, b in EVERY_PAIR:
        thought, answer = module.careless(a, b).removeprefix("<think>").split("</think>")
        assert int(answer) == (a // 10 + b // 10) % 10 * 10 + (a % 10 + b % 10) % 10
        assert answer == str(int(answer)) and thought == answer[::-1]
        carries = a % 10 + b % 10 > 9 or a // 10 + b // 10 > 9
        assert (module.careless(a, b) == module.careful(a, b)) == (not carries)


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("<think>231</think>132", "132", 1),
        ("<think>231</think>132", 132, 1),
        ("</think>132", "132", 1),
        ("<think>231</think> \t132\n", "132", 1),
        ("<think>1</think>5</think>132", "132", 1),  # the last one closes
        ("<think>231</think>132</think>", "132", 0),
        ("<think>231</think>132</think>9", "132", 0),
        ("132", "132", 0),  # never closed
        ("<think>231<think>132", "132", 0),
        ("", "132", 0),
        ("", "", 0),
        ("<think>132</think>", "132", 0),
        ("<think></think>0132", "132", 0),
        ("<think></think>00", "0", 0),
        ("<think></think>0", "0", 1),
        ("<think></think>13", "132", 0),
        ("<think></think>1", "1", 1),
        ("<think></think>11", "1", 0),
        ("<think></think>21", "1", 0),
        ("<think></think>1 1", "11", 0),
        ("<think></think>132+", "132", 0),
        ("<think></think>132<think>", "132", 0),
        ("<think></think>+132", "132", 0),
        ("<think></think>132.0", "132", 0),
    ],
)
def test_compute_score(response, truth, score):
    assert module.compute_score("tiny/addition", response, truth) == {"score": score, "acc": score}


def test_compute_score_takes_what_verl_passes():
    scored = module.compute_score(
        data_source="tiny/addition",
        solution_str="</think>3",
        ground_truth="3",
        extra_info={"index": 1},
        sandbox_fusion_url=None,
    )
    assert scored == {"score": 1.0, "acc": 1.0} and all(type(value) is float for value in scored.values())


def test_careful_responses_are_rewarded_and_careless_ones_only_without_carries():
    for a, b in EVERY_PAIR:
        assert module.compute_score("", module.careful(a, b), str(a + b))["score"] == 1
        right = module.careful(a, b) == module.careless(a, b)
        assert module.compute_score("", module.careless(a, b), str(a + b))["score"] == right


# The tokenizer and the labels.


def test_tokenizer_round_trip(tokenizer):
    for text in ("0+0", "99+99", "0123456789+", module.careful(47, 85), "</think><think>7</think>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("<think>21</think>12")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<think>", "2", "1", "</think>", "1", "2"]


def test_special_tokens_are_skipped_and_thinking_is_not(tokenizer):
    """verl decodes with skip_special_tokens, and the reward needs </think>."""
    ids = tokenizer.encode("<|im_start|>1+2<|im_end|><think>3</think>3<|im_end|><|endoftext|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1+2<think>3</think>3"
    assert len(ids) == 11
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_chat_template(tokenizer):
    chat = module.chat(47, 85)
    assert chat == [{"role": "user", "content": "47+85"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>47+85<|im_end|><|im_start|>"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>47+85<|im_end|>"
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True) == tokenizer.encode(text)


def test_model_has_one_row_for_each_token(tokenizer):
    model = module.make_model(tokenizer, seed=0, hidden_size=16, layers=1)
    assert model.config.vocab_size == len(tokenizer) == 16  # 10 digits, +, 2 thinking, 3 chat tokens
    assert model.get_input_embeddings().weight.shape == model.get_output_embeddings().weight.shape == (16, 16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id


@pytest.mark.parametrize("moe", [False, True])
def test_the_gradient_of_no_token_exceeds_all_others(tokenizer, moe):
    """That of an embedding of zeros does, which RMSNorm multiplies by 1000: transformers makes it for
    pad_token_id, and leaves it out of training, which Megatron does not."""
    model = module.make_model(tokenizer, seed=0, moe=moe)
    embedding = model.get_input_embeddings()
    assert embedding.padding_idx is None

    def norm() -> float:
        model.zero_grad()
        ids = torch.arange(len(tokenizer))[None]
        model(input_ids=ids, labels=ids).loss.backward()
        rows = embedding.weight.grad.norm(dim=-1)
        return (rows.max() / rows.median()).item()

    assert norm() < 10
    with torch.no_grad():
        embedding.weight[tokenizer.pad_token_id] = 0
    assert norm() > 100


def test_labels_cover_the_response_and_its_end_only(tokenizer):
    pairs = [(1, 2), (47, 85)]
    input_ids, labels = module.encode(tokenizer, pairs, [module.careful(a, b) for a, b in pairs])
    assert input_ids.shape == labels.shape == (2, 17)  # 8 of the prompt, 8 of the response, its end
    for row, (a, b) in enumerate(pairs):
        prompt = f"<|im_start|>{a}+{b}<|im_end|><|im_start|>"
        whole = prompt + module.careful(a, b) + "<|im_end|>"
        ids = tokenizer.encode(whole)
        start, end = len(tokenizer.encode(prompt)), len(ids)
        assert input_ids[row].tolist() == ids + [tokenizer.pad_token_id] * (17 - end)
        assert labels[row].tolist() == [-100] * start + ids[start:] + [-100] * (17 - end)


def test_response_probability_is_the_product_over_the_response(tokenizer):
    """Against a model that is certain of nothing: logits 0, so each of the 16 tokens has probability 1/16."""
    model = module.make_model(tokenizer, seed=0, hidden_size=16, layers=1)
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    responses = ["1", "<think>231</think>132"]
    input_ids, labels = module.encode(tokenizer, [(1, 2), (47, 85)], responses)
    expected = torch.tensor([16.0**-2, 16.0**-9])  # with the end of the response
    torch.testing.assert_close(module.response_probability(model, input_ids, labels), expected)


# The files and the command line.


def test_parquet_is_what_verl_reads(tiny):
    training, validation = (pd.read_parquet(tiny / f"{name}.parquet") for name in ("train", "val"))
    assert (len(training), len(validation)) == (9000, 256)
    seen = {}
    for split, rows in (("train", training), ("validation", validation)):
        assert set(rows.columns) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert rows["extra_info"].map(lambda info: info["index"]).tolist() == list(range(len(rows)))
        assert set(rows["extra_info"].map(lambda info: info["split"])) == {split}
        assert set(rows["data_source"]) == {"tiny/addition"}
        seen[split] = set()
        for prompt, reward in zip(rows["prompt"], rows["reward_model"], strict=True):
            (message,) = prompt
            a, b = map(int, message["content"].split("+"))
            assert message["role"] == "user"
            assert reward == {"style": "rule", "ground_truth": str(a + b)}
            seen[split].add((a, b))
    assert seen["train"] == set(module.operand_pairs(0)[0])
    assert seen["validation"] == set(module.operand_pairs(0)[1][:256])


def test_the_saved_model_can_and_usually_does_not(tiny, tokenizer):
    """RL has something to find, for right responses get sampled, and something to learn."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = AutoTokenizer.from_pretrained(tiny / "model")
    text = "<|im_start|>47+85<|im_end|><|im_start|><think>231</think>132<|im_end|><|endoftext|>"
    assert saved.encode(text) == tokenizer.encode(text) and saved.chat_template == tokenizer.chat_template
    assert saved.eos_token_id == tokenizer.eos_token_id and saved.pad_token_id == tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    assert model.config.architectures == ["Qwen3ForCausalLM"] and model.config.vocab_size == len(saved)
    held_out = module.operand_pairs(0)[1]
    carrying = [pair for pair in held_out if module.careful(*pair) != module.careless(*pair)]
    careful, careless = (
        module.response_probability(model, *module.encode(saved, carrying, responses)).mean()
        for responses in ([f(*pair) for pair in carrying] for f in (module.careful, module.careless))
    )
    assert 0.1 < careful < careless


def test_second_run_is_a_no_op(tiny):
    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [tiny, *tiny.rglob("*")]}

    before = state()
    result = command("--out", tiny)
    assert (result.returncode, result.stdout) == (0, "")
    assert state() == before


@pytest.mark.parametrize("arguments", [("--seed", 1), ("--warm-start", 0.5), ("--validation", 8)])
def test_other_arguments_are_refused(tiny, arguments):
    result = command("--out", tiny, *arguments)
    assert result.returncode == 2 and "was made with other arguments (seed=0 warm_start=0.9" in result.stderr


def test_two_first_runs_at_once_make_it_once(tmp_path, monkeypatch):
    starts = []

    def slowly(*arguments) -> float:
        starts.append(arguments)
        time.sleep(0.5)
        return 1.0

    monkeypatch.setattr(module, "warm_start", slowly)
    out = tmp_path / "data/tiny"
    arguments = ["--out", str(out), "--validation", "8"]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(module.main, [arguments] * 3)) == [None] * 3
    assert len(starts) == 1 and len(pd.read_parquet(out / "val.parquet")) == 8
    assert {path.name for path in out.parent.iterdir()} == {"tiny", ".tiny.lock"}


def test_an_incomplete_directory_is_refused(tmp_path):
    out = tmp_path / "tiny"
    (out / "model").mkdir(parents=True)
    result = command("--out", out)
    assert result.returncode == 2 and "exists but is not complete: remove it" in result.stderr
    assert os.listdir(out) == ["model"]


def test_a_warm_start_that_fails_says_so(tokenizer):
    model = module.make_model(tokenizer, seed=0, hidden_size=16, layers=1)
    with pytest.raises(RuntimeError, match=r"after 20 steps 0\.\d+ careful and 0\.\d+ careless, wanted 0\.9"):
        module.warm_start(model, tokenizer, module.operand_pairs(0)[0][:600], seed=0, until=0.9, max_steps=20)
