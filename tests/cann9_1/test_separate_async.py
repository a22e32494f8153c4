"""Training and rollout on different dies at the same time: what is refused, and rehearsals of the recipes."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from runs import PATIENCE_S, finish, launch, nothing_left_of
from wheels import sites, wheels_file

from ascend_rl.glue.cann9_1.options import MANAGER, options
from ascend_rl.launch.supervise import descendants
from ascend_rl.process.counts import VARIABLE, counted
from ascend_rl.process.logs import by_step, records
from ascend_rl.process.ports import free_port
from ascend_rl.rollout import server_restart
from ascend_rl.rollout.prompt_memory import PromptMemory
from ascend_rl.rollout.separate_async import check
from ascend_rl.settings import stack
from ascend_rl.settings.metrics import FRESH, GAP_MAX, GRAPH_SHARE, MFU_ROLLOUT, REQUESTS, USAGE
from ascend_rl.settings.switch import CannotWork

V1, CUSTOM = "trainer.v1", "+actor_rollout_ref.rollout.custom"
GSPO_32B = "gspo_qwen3_32b_64die_true_weight_async"
RECIPES = {GSPO_32B: "qwen3_32b", "gspo_qwen3_30b_a3b_32die_true_weight_async": "qwen3_30b_a3b"}
DRAWN = f"{CUSTOM}.use_tqdm=True"
TP1 = "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
TWO_SEATS = (
    "actor_rollout_ref.rollout.max_num_seqs=2",
    "actor_rollout_ref.rollout.cudagraph_capture_sizes=[2]",
)
CASES = {  # name: (recipe, overrides); with two seats, responses are unfinished when new weights come
    "a server dies": (GSPO_32B, [TP1, DRAWN]),
    "two seats": (GSPO_32B, TWO_SEATS),
    "experts": ([*RECIPES][1], []),
}
REFUSED = {
    f"{V1}.sampler.max_off_policy_threshold=1": "num_warmup_batches=1 batches ahead: use at least 1 + 1",
    f"{V1}.separate_async.num_warmup_batches=1.5": "use 1, or the strategy drop",
    f"{CUSTOM}.data_rebalance=True": "data_rebalance=True places",
    f"{CUSTOM}.rollout_rebalance.enable=True": "set ROLLOUT_REBALANCE_ENABLE=0",
    f"{CUSTOM}.compute_old_log_prob=False": "compute_old_log_prob=False takes all",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True": "would be those weights themselves",
}


def configured(*overrides: str):
    wait = [f"{V1}.sampler.max_off_policy_strategy=wait", f"{V1}.sampler.max_off_policy_threshold=3"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*wait, *overrides])


@pytest.mark.parametrize("given", [None, *REFUSED], ids=lambda text: str(text).rpartition(".")[2])
def test_what_would_be_ignored_or_wrong_is_refused(given):
    config = configured(*filter(None, [given]))
    if given is None:
        return check(config, options(config.actor_rollout_ref.rollout))
    with pytest.raises(CannotWork) as refusal:
        check(config, options(config.actor_rollout_ref.rollout))
    assert REFUSED[given] in str(refusal.value) and str(refusal.value).count("\n") == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_need_this_stack_and_divide_its_nodes(root, recipe):
    command = ["bash", f"internal/train_{recipe}.sh"]
    environment = os.environ | {
        "DRY_RUN": "1",
        "NNODES": "6",
        "ROLLOUT_NNODES": "4",
        "PARAMETER_SYNC_STEP": "2",
    }

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=root, env=environment | variables, capture_output=True, text=True)

    assert "set STACK=cann9.1 (docs/async.md)" in run(STACK="cann8.5").stderr
    assert (
        "ROLLOUT_NNODES=6 of NNODES=6: some have to roll out, and some to train"
        in run(ROLLOUT_NNODES="6").stderr
    )
    arguments = dict(
        argument.split("=", 1) for argument in json.loads(run().stdout)["args"] if "=" in argument
    )
    assert (arguments["trainer.nnodes"], arguments["actor_rollout_ref.rollout.nnodes"]) == ("2", "4")
    updates = int(arguments[f"{V1}.separate_async.parameter_sync_step"])
    mini_batch = int(arguments["actor_rollout_ref.actor.ppo_mini_batch_size"])
    assert updates == 2 and int(arguments["data.train_batch_size"]) == 2 * mini_batch
    assert arguments.get("actor_rollout_ref.rollout.expert_parallel_size") in (None, "32")


def test_the_linter_knows_the_dies_of_the_rollout(root):
    """Of TP4, seven dies on each of two nodes; and its KV cache has what the trainer would take beside it."""
    files = ["internal/train_gspo_qwen3_32b_64die_true_weight_async.sh", "internal/qwen3_32b_env.sh"]
    command = [sys.executable, "-m", "ascend_rl.lint", *files, "--json"]
    said = {}
    for npus in (16, 7):
        given = f"actor_rollout_ref.rollout.n_gpus_per_node={npus}"
        ran = subprocess.run([*command, given], cwd=root, capture_output=True, text=True, check=False)
        said[npus] = {one["check"]: one["why"] for one in json.loads(ran.stdout)}
    assert "TP 4 x DP 1 = 4, and there are 14 dies" in said[7]["parallel.rollout_world"]
    assert "parallel.rollout_world" not in said[16] and said[16]["rollout.seats"].startswith(
        "2048 seats in 8"
    )
    assert said[16]["rollout.kv_capacity"].startswith("16 of 256 sequences")


def test_a_run_with_the_manager_has_the_trainer(monkeypatch):
    from ascend_rl.glue.cann9_1 import async_trainer
    from verl.trainer.ppo.v1 import get_trainer_cls, trainer_separate_async

    made = []
    for module, name in (
        (async_trainer, "AsyncTrainer"),
        (trainer_separate_async, "PPOTrainerSeparateAsync"),
    ):
        monkeypatch.setattr(module, name, lambda config, name=name: made.append(name))
    for given in (MANAGER, None):
        config = {"actor_rollout_ref": {"rollout": {"agent": {"agent_loop_manager_class": given}}}}
        get_trainer_cls("separate_async")(OmegaConf.create(config))
    assert made == ["AsyncTrainer", "PPOTrainerSeparateAsync"]


def test_verl_may_log_with_flush(caplog):
    """As it does where no rollout shares the trainer's dies: without the hook that ends the run."""
    from verl.trainer.ppo.v1 import trainer_separate_async

    with caplog.at_level(logging.INFO, trainer_separate_async.__name__):
        trainer_separate_async.logger.info("a message", flush=True)
        assert caplog.messages == ["a message"]
        with pytest.raises(TypeError, match="flush"):
            trainer_separate_async.logger.logger.info("a message", flush=True)


WITHOUT_HCCL = """
import sys, threading, torch, verl
from verl.checkpoint_engine import hccl_checkpoint_engine as engine

def connect(rank):
    try:
        group = engine.stateless_init_process_group("127.0.0.1", int(sys.argv[1]), rank, 2, 0)
        group.broadcast(torch.ones(1, device="npu"), src=0)
        print("nothing was sent")
    except RuntimeError as error:
        print(error)

ranks = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
[rank.start() for rank in ranks], [rank.join() for rank in ranks]
"""


@pytest.mark.long
@pytest.mark.parametrize("hooked", [True, False])
def test_weights_are_not_sent_into_the_void(hooked):
    """Without the hook, a process that finds no libhccl.so goes on, and nothing reaches the rollout."""
    environment = os.environ | {
        "HCCL_SO_PATH": "/nowhere/libhccl.so",
        "SOFTWARE_NPU_WHEELS": str(wheels_file()),
        "PYTHONPATH": os.pathsep.join([*map(str, sites()), str(stack.DIRECTORY / "frameworks/vllm_ascend")]),
        "SOFTWARE_NPU_VLLM_ASCEND": "1",
    }
    code = WITHOUT_HCCL
    if not hooked:
        code = code.replace(
            "import sys",
            "from ascend_rl.glue.cann9_1 import hooks\nhooks.Hooks.install = lambda self: None\nimport sys",
            1,
        )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(free_port())], env=environment, capture_output=True, text=True
    )
    told = (
        "libhccl.so cannot be loaded, so no weights would reach the rollout" if hooked else "nothing was sent"
    )
    assert ran.stdout.count(told) == 2, ran.stdout + ran.stderr[-3000:]


def made(monkeypatch, queue: dict, **config):
    """As much of the trainer as the methods below take, over a queue that a list stands for."""
    from ascend_rl.glue.cann9_1 import async_trainer

    monkeypatch.setattr(async_trainer.tq, "kv_list", lambda partition: {partition: queue})
    trainer = async_trainer.AsyncTrainer.__new__(async_trainer.AsyncTrainer)
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"custom": config}}})
    trainer.timing_raw, trainer.agent_loop_manager = {}, SimpleNamespace(end=dict, restarts=None)
    trainer.global_steps, trainer.total_training_steps = 3, 9
    return trainer


def test_the_gap_of_fresh_responses_is_told_apart(monkeypatch):
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    def computed(self, batch, metrics):
        metrics[GAP_MAX] = 0.5
        return batch

    monkeypatch.setattr(PPOTrainerSeparateAsync, "_compute_old_log_prob", computed)
    trainer = made(monkeypatch, {})
    for versions, fresh in (((2, 2), True), ((2, 1), False)):
        tags = [{"min_global_steps": version} for version in versions] + [{"is_padding": True}]
        metrics = {}
        trainer._compute_old_log_prob(SimpleNamespace(tags=tags), metrics)
        assert (metrics.get(FRESH) == 0.5) == fresh


def test_responses_that_end_while_the_trainer_computes_are_counted(monkeypatch, tmp_path):
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    for name in ("on_sample_begin", "on_sample_end", "on_step_end"):
        monkeypatch.setattr(PPOTrainerSeparateAsync, name, lambda self: None)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "counts"))
    queue = {"prompt": {"is_prompt": True}}
    trainer = made(monkeypatch, queue, partial_rollout=True)
    for step, method in enumerate(
        ["on_sample_begin", "on_sample_end", "on_sample_begin", "on_sample_end", "on_step_end"]
    ):
        queue[f"prompt_{step}_0"] = {}
        getattr(trainer, method)()
    assert counted(tmp_path / "counts")["async"] == 2  # 2 to 3, and 4 to 5; 1 to 2 and 3 to 4 were waited for


def test_a_resumed_run_learns_what_it_has_asked_for():
    """Prompts are known until they are answered, over steps; the queue of a checkpoint has other answers."""
    from ascend_rl.glue.cann9_1.rollout_manager import RolloutManager

    manager = RolloutManager.__new__(RolloutManager)
    manager.memory, manager.key_of = PromptMemory(), {"a": "its key", "later": "another"}
    tag = {"prompt_len": 3, "seq_len": 10}
    manager.learn(SimpleNamespace(keys=["a_0", "a_1", "b_0"], tags=[tag] * 3, partition_id="train"))
    assert list(manager.memory.lengths) == ["its key"] and manager.key_of == {"later": "another"}


@pytest.mark.parametrize("partial, last", [(True, False), (False, False), (False, True)])
def test_without_partial_rollout_a_step_ends_when_all_prompts_are_answered(monkeypatch, partial, last):
    """But not the last one, which may be that of a run whose time is over."""
    from verl.trainer.ppo.v1 import replay_buffer
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    states = [
        {"status": status, "is_prompt": True, "global_steps": 3}
        for status in ("pending", "running", "finished")
    ]
    looks, trainer = [], made(monkeypatch, {}, partial_rollout=partial)
    trainer.total_training_steps = trainer.global_steps + (not last)
    monkeypatch.setattr(
        replay_buffer.tq, "kv_list", lambda: looks.append(1) or {"train": {"uid": states[len(looks) - 1]}}
    )
    monkeypatch.setattr(PPOTrainerSeparateAsync, "on_step_end", lambda self: None)
    trainer.replay_buffer = replay_buffer.ReplayBufferAsync(
        "separate_async", None, 2, "wait", {}, poll_interval=0.01
    )
    trainer.on_step_end()
    drains = not partial and not last
    assert len(looks) == 3 * drains and ("drain" in trainer.timing_raw) == drains


def rehearse(output: Path, recipe: str, *overrides: str, **variables: object) -> subprocess.Popen:
    given = {"SMOKE": 1, "SMOKE_DTYPE": "float32", "NUM_WARMUP_BATCHES": 0.5, "VERBOSE": 0}
    if TP1 in overrides:
        given["VLLM_ASCEND_ENABLE_FLASHCOMM1"] = 0  # of several ranks
    of_cpus = [f"--unset={name}" for name in os.environ if name.startswith(("VERL", "VLLM"))]
    where = {"environment": f"{RECIPES[recipe]}_env.sh", "inside": ["env", *of_cpus]}
    return launch(f"train_{recipe}.sh", output, *overrides, **where, **given | variables)


def wait_for_step(run: subprocess.Popen, step: int, log: Path) -> None:
    while run.poll() is None and not (
        log.exists() and re.search(rb"Progress.* %d/" % step, log.read_bytes())
    ):
        time.sleep(0.2)


def kill_a_server(run: subprocess.Popen, log: Path) -> None:
    """One of them, with its engine, once the first step is over."""
    wait_for_step(run, 1, log)
    servers = [pid for pid, name in descendants(run.pid).items() if name.startswith("ray::Server")]
    assert len(servers) == 2, "the run ended before its second step"
    os.kill(servers[0], signal.SIGKILL)


@pytest.mark.weekly
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("case", CASES)
def test_three_steps(tmp_path, case):
    """Half of each batch is generated while the trainer computes, and one version behind, so it differs.

    The other half is fresh: with the weights that HCCL has brought, both are the same model.
    A server that dies in the second step, whose requests the other one answers, is back in the third.
    """
    recipe, overrides = CASES[case]
    with nothing_left_of(tmp_path):
        run = rehearse(tmp_path / "run", recipe, *overrides, STEPS=3)
        if TP1 in overrides:
            kill_a_server(run, tmp_path / "run/train.log")
        said = finish(run, tmp_path / "run")
    assert run.returncode == 0, said[-6000:]
    report = json.loads((tmp_path / "run/rehearsal.json").read_text())
    assert report["gap"]["met"] is True and report["features"]["async"] > 16, report
    steps = [record["data"] for record in records(tmp_path / "run/metrics.jsonl")]
    assert [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps] == [0, 1, 1]
    spans = [step["training/off_policy/trajectory_spans/max"] for step in steps]
    assert overrides is not TWO_SEATS or max(spans) == 2, spans  # old weights began it, and new ones went on
    for step in steps:
        assert step[USAGE] > 0 < step[GRAPH_SHARE] and MFU_ROLLOUT not in step  # no phase is the rollout
    engines = 1 if overrides is TWO_SEATS else 2  # of two servers, or of DP2
    assert sum(key.startswith(REQUESTS) for key in steps[-1]) == engines
    if TP1 in overrides:
        assert steps[-1][server_restart.METRIC] == 1
        log = (tmp_path / "run/train.log").read_text()
        drawn = re.findall(r"rollout (\d): (\d+) tokens/s, \d running, \d+ waiting, longest \d+", log)
        assert {step for step, _ in drawn} == {"1", "2", "3"} and any(int(speed) for _, speed in drawn)
    for step in steps[1:]:
        assert step["training/off_policy/trajectory_staleness_worst/mean"] == 0.5
        assert step[FRESH] <= 1e-5 < 5e-5 < step[GAP_MAX]
    processes = [json.loads(file.read_text()) for file in (tmp_path / "run/record").glob("[0-9]*.json")]
    received = [one["collectives"] for one in processes if "CheckpointEngineWorker" in one["process"]]
    # The first weights and those after each step, in one bucket.
    assert received and all(counts["hccl::broadcast"] == 4 for counts in received), received
    assert (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text() == "3"
    assert (tmp_path / "run/checkpoints/global_step_3/transfer_queue").is_dir()


@pytest.mark.weekly
@pytest.mark.timeout(3 * PATIENCE_S)
def test_a_run_that_is_stopped_continues_with_the_responses_it_had(tmp_path):
    """SIGTERM in step 3 of 9: it is saved with what is answered, which the first step after it trains."""
    overrides = [TP1, "trainer.save_freq=100", "trainer.resume_mode=auto"]
    output, metrics = tmp_path / "run", tmp_path / "run/metrics.jsonl"
    with nothing_left_of(tmp_path):
        run = rehearse(output, GSPO_32B, *overrides, STEPS=9, SAVE_GRACE_S=PATIENCE_S)
        wait_for_step(run, 2, output / "train.log")
        run.send_signal(signal.SIGTERM)
        said = finish(run, output)
    assert run.returncode == 75, said[-6000:]
    last = max(by_step(metrics))
    assert 3 <= last < 9 and f"saved at step {last}: the same command resumes" in said
    with nothing_left_of(tmp_path):
        run = rehearse(output, GSPO_32B, *overrides, STEPS=last + 2)
        said = finish(run, output)
    assert run.returncode == 0, said[-6000:]
    assert [*by_step(metrics)] == [*range(1, last + 3)] and len(records(metrics)) == 2
    for record in records(metrics):
        assert record["data"]["training/off_policy/trajectory_staleness_worst/mean"] == 0.5
        assert record["data"][FRESH] <= 1e-5 < record["data"][GAP_MAX]
