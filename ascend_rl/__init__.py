"""The algorithms behind the patches, and the tools around a run.

A house of fourteen rooms on five floors: a room imports from lower floors only (tests/test_house.py). Nothing
in it imports verl, vllm, vllm_ascend, megatron, mindspeed or roll, but for a check that vLLM works: patches
hand in the objects and functions of a framework that an algorithm needs.

    floor 4   launch  estimate
    floor 3   preflight  recipe
    floor 2   lint
    floor 1   loss  rollout  speculation  experts  weights  hdp  host  planning
    floor 0   settings

The modules beside the rooms are commands: ``python -m ascend_rl.tiny`` and so on.
"""
