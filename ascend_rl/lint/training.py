"""Rules about the trainer: Megatron, MindSpeed, FSDP, checkpoints and what a resumed run continues from."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

from ascend_rl.estimate import memory_plan
from ascend_rl.lint import switches
from ascend_rl.lint.memory import lora_rank
from ascend_rl.lint.setup import ACTOR, LOADS_WEIGHTS, MEGATRON, Setup, rule
from ascend_rl.settings import stack
from ascend_rl.weights import checkpoints

LOCAL_DIRECTORIES = ("/tmp", "/var", "/dev/shm")


@rule(
    "train.torch_compile",
    "error" if stack.NAME == stack.DEFAULT else "warning",
    "torch.compile is off in FSDP training on NPUs",
    why="the actor compiles its entropy with Inductor, which has no NPU backend here: compile_fx fails in "
    "the first step"
    if stack.NAME == stack.DEFAULT
    else "the actor compiles its entropy with Inductor, whose NPU backend no recipe here was run with",
    fix=f"set {ACTOR}.use_torch_compile=False",
)
def torch_compile(s):
    if s.npu and s.fsdp and s.get(f"{ACTOR}.use_torch_compile"):
        yield f"{ACTOR}.use_torch_compile", "True (verl's default)"


@rule(
    "train.flash_attn",
    "error",
    "MindSpeed's flash attention is on",
    why="without it: 'Please set micro_batch_size or set use_flash_attn=True in config', or the attention "
    "matrix of long sequences runs out of memory in the update",
    fix=f"+{MEGATRON}.override_transformer_config.use_flash_attn=True",
)
def train_flash_attn(s):
    key = f"{MEGATRON}.override_transformer_config.use_flash_attn"
    default = stack.NAME != stack.DEFAULT  # verl 0.9.1 sets it
    if s.npu and s.megatron and s.get(key, default) is not True:
        yield key, str(s.get(key, "not set"))


@rule(
    "train.mindspeed_values",
    "error",
    "MindSpeed gets what its checks of options read",
    why="with the fused rotary embedding it asks the configuration for position_embedding_type, which verl "
    "does not set (AttributeError); the split of a pipeline it parses as a string (TypeError on a list)",
    fix="+...override_transformer_config.position_embedding_type=rope, and quotes: "
    "\"...pipeline_num_transformer_layers='[[23],[24],[24],[23]]'\"",
)
def mindspeed_values(s):
    prefix = f"{MEGATRON}.override_transformer_config"
    if not (s.npu and s.megatron):
        return
    position = s.get(f"{prefix}.position_embedding_type")
    if s.get(f"{prefix}.use_fused_rotary_pos_emb") and position != "rope":
        yield f"{prefix}.position_embedding_type", "not set" if position is None else str(position)
    split = s.get(f"{prefix}.pipeline_num_transformer_layers")
    if split is not None and not isinstance(split, str):
        yield f"{prefix}.pipeline_num_transformer_layers", f"a list, {split}"


@rule(
    "train.recompute",
    "error",
    "full recomputation specifies the method and the number of layers",
    why="Megatron raises ValueError",
    fix="add recompute_method=uniform and recompute_num_layers=1",
)
def train_recompute(s):
    prefix = f"{MEGATRON}.override_transformer_config"
    if (
        s.megatron
        and s.get(f"{prefix}.recompute_granularity") == "full"
        and not (s.get(f"{prefix}.recompute_method") and s.get(f"{prefix}.recompute_num_layers"))
    ):
        yield (
            f"{prefix}.recompute_granularity",
            "full, and recompute_method or recompute_num_layers is not set",
        )


@rule(
    "train.overlap_weights",
    "error",
    "alltoall overlap loads its weights from a distributed checkpoint",
    why="its experts are stored as one grouped matrix, which mbridge (verl's default) does not know",
    fix=f"{MEGATRON}.use_mbridge=False with use_dist_checkpointing=True and a converted checkpoint",
)
def overlap_weights(s):
    prefix = f"{MEGATRON}.override_transformer_config"
    dense = s.model and not s.model.experts
    by_variable = s.variable(switches.OVERLAP) == 1 and not dense
    if stack.NAME == stack.DEFAULT and s.megatron and s.get(f"{MEGATRON}.use_mbridge"):
        if s.get(f"{prefix}.moe_alltoall_overlap_comm"):
            yield f"{MEGATRON}.use_mbridge", "True, with MindSpeed's alltoall overlap"
        elif by_variable:
            yield f"{MEGATRON}.use_mbridge", f"True, with {switches.OVERLAP}=1"


@rule(
    "train.dist_checkpoint",
    "error",
    "a path is given where a distributed checkpoint is used",
    why="verl has nothing to load the weights from",
    fix=f"set {MEGATRON}.dist_checkpointing_path",
)
def dist_checkpoint(s):
    if (
        s.megatron
        and s.get(f"{MEGATRON}.use_dist_checkpointing")
        and not s.get(f"{MEGATRON}.dist_checkpointing_path")
    ):
        yield f"{MEGATRON}.dist_checkpointing_path", "not set, and use_dist_checkpointing is True"


@rule(
    "train.swap_optimizer",
    "error",
    "the optimizer is either swapped by MindSpeed or offloaded by verl",
    why="both move the same states between host and die",
    fix=f"set {MEGATRON}.optimizer_offload=False",
)
def swap_optimizer(s):
    if (
        s.megatron
        and s.get(f"{MEGATRON}.override_transformer_config.swap_optimizer")
        and s.get(f"{MEGATRON}.optimizer_offload")
    ):
        yield f"{MEGATRON}.optimizer_offload", "True, with swap_optimizer"


def saves(s: Setup) -> int:
    """Steps between two checkpoints; 0 for none."""
    return max(s.number("trainer.save_freq", -1), 0)


@rule(
    "train.shared_storage",
    "warning",
    "checkpoints of several nodes are on shared storage",
    why="each node writes its shards; a resume finds only its own",
    fix="use an absolute path that all nodes mount",
)
def shared_storage(s):
    if s.number("trainer.nnodes") < 2:
        return
    keys = ["trainer.default_local_dir"] if saves(s) else []
    if s.get(f"{MEGATRON}.use_dist_checkpointing"):
        keys.append(f"{MEGATRON}.dist_checkpointing_path")
    for key in keys:
        path = str(s.get(key, ""))
        if path and (not path.startswith("/") or path.startswith(LOCAL_DIRECTORIES)):
            yield key, f"'{path}' on {s.number('trainer.nnodes')} nodes"


@rule(
    "train.saves_nothing",
    "warning",
    "a run on NPUs that trains a checkpoint saves what it learns",
    why="with save_freq=-1 verl saves nothing, not even the last step: a failure costs the whole run",
    fix="trainer.save_freq=5 trainer.max_actor_ckpt_to_keep=2; see docs/resilience.md for how often",
)
def saves_nothing(s):
    random_weights = s.megatron and not all(s.get(key, True) for key in LOADS_WEIGHTS)
    trial = random_weights or 0 < s.number("trainer.total_training_steps", 0) < 20
    if s.npu and not saves(s) and not trial:
        yield "trainer.save_freq", f"{s.get('trainer.save_freq')}"


@rule(
    "train.limit_saves_nothing",
    "error",
    "a run with a time limit saves",
    why="with save_freq=-1 there is nothing to save when the time is over: the run would just be ended",
    fix="give trainer.save_freq, or leave --save-by (SAVE_BY) out",
)
def limit_saves_nothing(s):
    if s.env.get("SAVE_BY") and not saves(s):
        yield "trainer.save_freq", f"{s.get('trainer.save_freq')}, with SAVE_BY={s.env['SAVE_BY']}"


@rule(
    "train.schedule_restarts",
    "warning",
    "a Megatron run that is resumed continues with its learning rate",
    why="Megatron then restarts warm-up and decay, one step after the resume",
    fix=f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler=True; see docs/resilience.md",
)
def schedule_restarts(s):
    optim = f"{ACTOR}.optim"
    if not (s.megatron and saves(s)) or s.get(f"{optim}.use_checkpoint_opt_param_scheduler"):
        return
    for key in ("lr_warmup_steps", "lr_warmup_steps_ratio"):
        if s.number(f"{optim}.{key}", 0) > 0:
            yield f"{optim}.{key}", f"{s.get(f'{optim}.{key}')}"
    if (style := s.get(f"{optim}.lr_decay_style", "constant")) != "constant":
        yield f"{optim}.lr_decay_style", f"{style}"


@rule(
    "train.resume_engine",
    "error",
    "the checkpoint that a run would continue from is one that its engine can load",
    why="FSDP loads what as many dies saved, Megatron what Megatron saved",
    fix="train as the checkpoint was saved, set another OUTPUT_DIR, or trainer.resume_mode=disable",
)
def resume_engine(s):
    mode = s.get("trainer.resume_mode")
    key = "trainer.resume_from_path" if mode == "resume_path" else "trainer.default_local_dir"
    if not s.here or mode == "disable":
        return
    folder = Path(str(s.get(key, ".")))
    if found := folder if mode == "resume_path" else checkpoints.newest(folder):
        ranks = s.number("trainer.nnodes") * s.number("trainer.n_gpus_per_node")
        if reason := checkpoints.other_engine(str(found), str(s.get(f"{ACTOR}.strategy")), ranks):
            yield key, f"{found}: {reason}"


@rule(
    "train.checkpoint_disk",
    "error",
    "the disk has room for the checkpoints that are kept, and for one being written",
    why="a save that fills the disk ends the run; earlier checkpoints stay whole",
    fix="set OUTPUT_DIR to a larger disk, or keep fewer: trainer.max_actor_ckpt_to_keep=1",
)
def checkpoint_disk(s):
    if not (s.here and saves(s) and s.model):
        return
    folder = Path(str(s.get("trainer.default_local_dir", "."))).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    kept = s.number("trainer.max_actor_ckpt_to_keep", 0)
    wanted = (kept + 1) * memory_plan.checkpoint_bytes(s.model, not s.megatron, lora_rank(s))
    if kept and (free := shutil.disk_usage(existing).free) < wanted:
        yield "trainer.default_local_dir", f"{free / 1e9:.0f} GB free, {wanted / 1e9:.0f} GB needed"


@rule(
    "train.hdp",
    "error",
    "with USE_HDP=1 the Megatron actor can follow plans",
    why="the actor refuses it when it is built",
    fix="see docs/hdp.md, or unset USE_HDP",
)
def train_hdp(s):
    if s.variable("USE_HDP") != 1:
        return
    if not s.megatron:
        yield "$USE_HDP", f"1, and {ACTOR}.strategy is {s.get(f'{ACTOR}.strategy')}, which ignores it"
        return
    from ascend_rl.hdp import hdp_training  # imports torch

    if s.get("trainer.use_legacy_worker_impl") == "disable":
        yield "$USE_HDP", f"1, and {hdp_training.ENGINE_WORKERS}"
    second = stack.NAME != stack.DEFAULT  # where the loss is that of the whole batch
    actor = s.mapping(ACTOR) | {
        "megatron": s.mapping(MEGATRON) | {"context_parallel_size": s.cp},
        "router_replay": s.mapping(f"{MEGATRON if second else ACTOR}.router_replay"),
        "policy_loss": s.mapping(f"{ACTOR}.policy_loss"),
        "whole_batch_loss": second or s.get(f"{ACTOR}.whole_batch_loss"),
    }
    transformer = SimpleNamespace(**s.mapping(f"{MEGATRON}.override_transformer_config"))
    for problem in hdp_training.problems(actor, transformer, s.mapping("actor_rollout_ref.model.mtp")):
        yield "$USE_HDP", f"1, and {problem}"
