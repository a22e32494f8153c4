"""The algorithms behind the patches, and the tools around a run.

A house of fifteen rooms on six floors: a room imports from lower floors only (tests/test_house.py). Only glue
imports verl, vllm, vllm_ascend, megatron, mindspeed or roll: it and the patches hand in the objects and
functions of a framework that an algorithm needs.

    floor 5   launch
    floor 4   preflight  recipe
    floor 3   lint  glue
    floor 2   loss  rollout  speculation  experts  weights  hdp  host  estimate
    floor 1   process
    floor 0   settings

__main__ is the command ``ascend-rl``; the modules beside it are for ``python -m ascend_rl.tiny`` and so on.
"""
