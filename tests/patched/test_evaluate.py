"""python -m ascend_rl.evaluate with vLLM's own server on the tiny model: the responses are Hugging Face's."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd
import pytest
import torch

from ascend_rl.recipe.tiny import compute_score

PROBLEMS = 16


@pytest.mark.weekly
def test_greedy_responses_are_hugging_faces(tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, data = tiny / "model", tiny / "val.parquet"
    command = [sys.executable, "-m", "ascend_rl.evaluate", model, "--data", data, "--limit", PROBLEMS]
    command += ["--temperature", "0", "--max-tokens", "16", "--out", tmp_path]
    command += ["--", "--dtype", "float32", "--max-num-seqs", PROBLEMS]
    command = list(map(str, command))
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    samples = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()][1:]
    assert len(samples) == PROBLEMS

    tokenizer, reference = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    expected = []
    for row in pd.read_parquet(data)[:PROBLEMS].itertuples():
        prompt = tokenizer.apply_chat_template(list(row.prompt), add_generation_prompt=True)
        ids = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[0, len(prompt) :]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        score = compute_score("", text, row.reward_model["ground_truth"])["score"]
        expected.append((row.reward_model["ground_truth"], text, score))
    found = [(sample["truth"], sample["response"], sample["score"]) for sample in samples]
    assert sorted(found) == sorted(expected)
    result = json.loads((tmp_path / "report.json").read_text())["results"]["val"]
    assert result["avg@1"] == sum(score for *_, score in expected) / PROBLEMS and result["cut off"] == 0

    again = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert again.returncode == 0 and "starting vllm" not in again.stdout  # nothing was left to ask
    assert again.stdout.split("report.json")[0].count("avg@1") == 1
