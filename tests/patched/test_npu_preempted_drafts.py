"""A request that was preempted resumes without the drafts that it had, which follow another token."""

from __future__ import annotations

import torch
from npu_ground import make_llm, save_random_model
from test_npu_runner import greedy
from test_npu_sam_decoding import repeating

from ascend_rl.settings.stack import DEFAULT, NAME

THRESHOLD = 2  # requests with drafts
BLOCKS = 5  # of 128 tokens, one of which vLLM keeps
# The first outgrows its second block while the other has two: that one waits until the first has ended, and
# resumes beside two new ones, which are too many for drafts.
LENGTHS, LATE, NEW_TOKENS = (236, 125), (4, 4), (60, 60, 20, 20)


def decode(path: str, prompts: list[list[int]]) -> dict:
    """A job: ids by prompt; drafts that preempted requests had; of each step with more requests than get
    drafts its prefills, drafts and replays."""
    from vllm import SamplingParams

    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 5, 10]}
    llm = make_llm(
        path, enforce_eager=False, compilation_config=graphs, num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=False, speculative_config={"method": "sam", "num_speculative_tokens": 4},
        additional_config={"bs_threshold_for_spec_decode": THRESHOLD},
    )  # fmt: skip
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    execute, preempt, steps, had = runner.execute_model, core.scheduler._preempt_request, [], []

    def counted(scheduled, *args):
        before = torch.npu.graphs.counts()["replays"]
        result = execute(scheduled, *args)
        if len(scheduled.num_scheduled_tokens) > THRESHOLD:
            resumed = scheduled.scheduled_cached_reqs.resumed_req_ids
            steps.append({
                "prefill": bool(scheduled.scheduled_new_reqs or resumed),
                "drafts": sum(map(len, scheduled.scheduled_spec_decode_tokens.values())),
                "replays": torch.npu.graphs.counts()["replays"] - before,
            })  # fmt: skip
        return result

    def counted_preempt(request, *args):
        had.append(len(request.spec_token_ids))
        return preempt(request, *args)

    runner.execute_model, core.scheduler._preempt_request = counted, counted_preempt
    ids, waiting = {}, list(zip(range(len(prompts)), prompts, NEW_TOKENS, strict=True))

    def add(count: int) -> None:
        for number, prompt, tokens in [waiting.pop(0) for _ in range(count)]:
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)

    add(len(LENGTHS))
    while engine.has_unfinished_requests():
        for output in engine.step():
            ids[output.request_id] = list(output.outputs[0].token_ids)
        if had and waiting:
            add(len(LATE))
    return {"ids": [ids[number] for number in sorted(ids)], "had": had, "steps": steps}


def test_drafts_do_not_outlive_a_preemption(npu_ground, tmp_path):
    model = save_random_model(tmp_path)
    text = repeating(1)[0]
    prompts = [(text * 3)[:length] for length in LENGTHS] + [[5, 6, 7, 3 + i] for i in range(len(LATE))]
    found = npu_ground.run(decode, str(model), prompts)
    print({key: found[key] for key in ("had", "steps")})
    right = greedy(model, prompts, max(NEW_TOKENS))
    assert found["ids"] == [ids[:n] for ids, n in zip(right, NEW_TOKENS, strict=True)]
    assert found["had"] and found["had"][-1]
    decodes = [step for step in found["steps"] if not step["prefill"]]
    assert len(decodes) > 10
    assert not any(step["drafts"] for step in decodes)
    if NAME == DEFAULT:  # vllm-ascend 0.23 replays no graph in a step without drafts
        assert all(step["replays"] == 1 for step in decodes)
