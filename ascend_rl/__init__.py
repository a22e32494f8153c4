"""The algorithms behind the patches, and the tools around a run.

A house of fifteen rooms on six floors: a room imports from lower floors only (tests/test_house.py). Nothing
in it imports verl, vllm, vllm_ascend, megatron, mindspeed or roll, but for a check that vLLM works: patches
hand in the objects and functions of a framework that an algorithm needs.

    floor 5   launch  estimate
    floor 4   preflight  recipe
    floor 3   lint
    floor 2   loss  rollout  speculation  experts  weights  hdp  host  planning
    floor 1   process
    floor 0   settings

The modules beside the rooms are commands: ``python -m ascend_rl.tiny`` and so on.
"""
