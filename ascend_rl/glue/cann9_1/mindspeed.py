"""MindSpeed core_r0.16.0 in the workers of verl that train with Megatron."""

from __future__ import annotations

import builtins
from types import ModuleType

from ascend_rl.glue.cann9_1.hooks import Hooks

hooks = Hooks()


@hooks.after("mindspeed.patch_utils")
def ask_modules_for_their_own_names(module: ModuleType) -> None:
    """As patch quick_repatch of the other stack: each of 80 patches asks each loaded module by hasattr.

    Lazy ones of transformers 5 then import a file each and warn: 20,000 lines in a worker.
    """

    def hasattr(value, name: str) -> bool:
        return name in vars(value) if isinstance(value, ModuleType) else builtins.hasattr(value, name)

    module.hasattr = hasattr


@hooks.after("mindspeed.patch_utils")
def remove_the_last_patch_first(module: ModuleType) -> None:
    """verl patches anew for each engine, such as the reference and the actor.

    A class that replaced another, as the swapped optimizer, else gets that one's unpatched methods for good.
    """
    manager = module.MindSpeedPatchesManager

    def remove_patches() -> None:
        for patch in reversed(manager.patches_info.values()):
            patch.remove_patch()
            patch.remove_wrappers()

    manager.remove_patches = remove_patches


@hooks.after("mindspeed.op_builder.builder")
def include_cstring(module: ModuleType) -> None:
    """As patch builder of the other stack: sources use what <cstring> declares without including it."""
    load = module.MindSpeedOpBuilder.load

    def load_with_cstring(self, *args, **kwargs):
        flags = self.cxx_args()
        self.cxx_args = lambda: ["-include", "cstring", *flags]
        return load(self, *args, **kwargs)

    module.MindSpeedOpBuilder.load = load_with_cstring


@hooks.after("mindspeed.core.optimizer.swap_optimizer.swap_optimizer")
def save_and_load_what_is_in_host_memory(module: ModuleType) -> None:
    """As patch swap_optimizer of the other stack: between updates, those on the device are empty."""
    optimizer = module.SwapDistributedOptimizer

    def get(self, model_param) -> dict:
        tensors = super(optimizer, self)._get_main_param_and_optimizer_states(model_param)
        module.torch.cuda.synchronize()
        in_host = self.param_to_cpu_states_map.get(tensors["param"], {})
        return {key: value for key, value in (tensors | in_host).items() if value is not None}

    def put(self, model_param, tensors: dict) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        if main_param not in self.param_to_cpu_states_map:
            return super(optimizer, self)._set_main_param_and_optimizer_states(model_param, tensors)
        self.swap_tensors_to_host(main_param)
        for key, value in get(self, model_param).items():
            value.detach().copy_(tensors[key])

    def load_state_dict(self, state_dict: dict) -> None:
        super(optimizer, self).load_state_dict(state_dict)
        for group in self.optimizer.param_groups:
            self.optimizer.param_to_group_map |= dict.fromkeys(group["params"], group)

    optimizer._get_main_param_and_optimizer_states = get
    optimizer._set_main_param_and_optimizer_states = put
    optimizer.load_state_dict = load_state_dict
