"""The options that the linter reads from vLLM's sources are those that vLLM itself accepts."""

from __future__ import annotations

import dataclasses

from ascend_rl.lint import options as lint_options


def test_the_options_are_those_of_vllms_parser():
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = make_arg_parser(FlexibleArgumentParser())._actions
    words = {word for action in actions for word in action.option_strings if word.startswith("--")}
    options = {word[2:].replace("-", "_") for word in words}
    known = set(lint_options.vllm_options())
    assert options - known == {"help", "no_disable_log_requests"}
    assert {name for name in known - options if not name.startswith("no_")} == set()


def test_the_fields_are_those_of_vllms_configurations():
    from vllm import config

    classes = lint_options.vllm_classes()
    for name in ("CompilationConfig", "PassConfig", "SpeculativeConfig", "EPLBConfig", "KVTransferConfig"):
        fields = dataclasses.fields(getattr(config, name, None) or getattr(config.compilation, name))
        assert set(classes[name]) == {field.name for field in fields if field.init}


def test_the_optimizers_arguments_are_those_of_torch():
    import inspect

    from torch.optim import SGD, AdamW

    for optimizer in (AdamW, SGD):
        known = lint_options.optimizer_arguments("torch.optim", optimizer.__name__)
        assert known == tuple(inspect.signature(optimizer).parameters)


def test_the_fields_are_those_of_megatrons_configurations():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    for kind in (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        fields = {field.name for field in dataclasses.fields(kind) if field.init}
        assert set(lint_options.megatron_classes()[kind.__name__]) == fields
