"""Lengths of a prompt's earlier responses travel with its samples, to the scheduler of the engine.

The trainer remembers them (`rollout.prompt_memory`). An engine would know them of the samples that it had
itself; those of a prompt are spread over engines. A request that moves to another engine brings them along,
and how many tokens of its response are part of what is the prompt there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ascend_rl.rollout.prompt_memory import PromptMemory

SCHEDULER = "ascend_rl.glue.length_scheduler.scheduler"  # engine_kwargs.vllm.scheduler_cls
KEY = "known_lengths"  # of a sample, in a DataProto's non_tensor_batch; in SamplingParams.extra_args


def schedules(vllm: Mapping) -> bool:
    """Whether engine_kwargs.vllm name this scheduler."""
    return vllm.get("scheduler_cls") == SCHEDULER


def known_of(memory: PromptMemory, prompts: Sequence[str]) -> list[dict]:
    """[N] what the engine learns of each prompt, for `with_lengths`."""
    return [{"prompt": prompt, "lengths": memory.lengths.get(prompt, [])} for prompt in prompts]


def with_lengths(sampling_params: dict, known: dict | None) -> dict:
    """The sampling parameters of a sample that tell the engine its prompt and earlier lengths.

    Args:
        known: ``prompt``, the same for all its samples, and ``lengths``, tokens of its responses in an
            earlier epoch; None: the engine knows siblings by the tokens of their prompt.
    """
    if known is None:
        return sampling_params
    return sampling_params | {"extra_args": (sampling_params.get("extra_args") or {}) | {KEY: known}}


def moved(sampling_params: dict, done: int) -> dict:
    """Those of a request that goes on elsewhere, with ``done`` tokens of its response behind its prompt."""
    known = (sampling_params.get("extra_args") or {}).get(KEY)
    return with_lengths(sampling_params, known and known | {"done": done})
