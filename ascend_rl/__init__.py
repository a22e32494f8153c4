"""The algorithms behind the patches, and the tools around a run.

A house of sixteen rooms on six floors: a room imports from lower floors only (tests/test_house.py). Only glue
imports verl, vllm, vllm_ascend, megatron, mindspeed or roll: it and the patches hand in the objects and
functions of a framework that an algorithm needs.

    floor 5   launch  estimate
    floor 4   preflight  recipe
    floor 3   lint  glue
    floor 2   loss  rollout  speculation  experts  weights  hdp  host  planning
    floor 1   process
    floor 0   settings

The modules beside the rooms are commands: ``python -m ascend_rl.tiny`` and so on.
"""
