#!/usr/bin/env bash
# GSPO on Qwen3-30B-A3B with Megatron on 2 nodes of 8: 2K prompts, 8K responses, DAPO-Math-17k; TP4 PP4, vLLM TP4 and EP.
#
# Usage:    bash ray_start_npu.sh internal/train_gspo_qwen3_30b_a3b_16die_true_weight.sh internal/qwen3_30b_a3b_env.sh \
#               [HYDRA_OVERRIDES...]
# Example:  NPU_SERIES=a2 bash ray_start_npu.sh internal/train_gspo_qwen3_30b_a3b_16die_true_weight.sh \
#               internal/qwen3_30b_a3b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_gspo_qwen3_30b_a3b_16die_true_weight.sh internal/qwen3_30b_a3b_env.sh
# Writes:   OUTPUT_DIR (outputs/gspo_qwen3_30b_a3b_16die_true_weight): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: 2 Atlas 800T A2 nodes of 8 NPUs with 64 GB, storage shared by both
# Duration: not published
#
# Experts are spread over the dies of a stage (EP = dies / PP) and of the rollout (DP = dies / TP): EP4 and DP4 here, and
# with NNODES=4 the published EP8 and DP8, for which 16 dies are too few.
#
# Variables: NNODES (2), NPUS_PER_NODE (8), MODEL_PATH, TRAIN_FILE (DAPO-Math-17k), TEST_FILE (AIME), OUTPUT_DIR, LOSS_MODE
#            (gspo), CLIP_RATIO_LOW and CLIP_RATIO_HIGH (0.0003, 0.0004), OVERLONG (True: penalise responses near
#            the limit); SMOKE=1 runs it scaled down on a laptop (docs/rehearsal.md)
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
case "${1:-}" in -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;; esac
use_python
dies 2 8
inputs Qwen/Qwen3-30B-A3B dapo_math aime

MAX_PROMPT=2048 MAX_RESPONSE=8192 OVERLONG="${OVERLONG:-True}" OVERLONG_LEN=4096 OVERLONG_FACTOR=0.5
TRAIN_BATCH=32 MINI_BATCH=4         # eight updates per step
TP=4 PP=4 EP=$((DIES / 4)) GEN_TP=4 GEN_DP=$((DIES / 4))
whole "$DIES" $((TP * PP)) "DIES must be a multiple of TP x PP = $TP x $PP"
whole 128 $((GEN_TP * GEN_DP)) "the rollout spreads 128 experts over $DIES dies"
TRANSFORMER=actor_rollout_ref.actor.megatron.override_transformer_config

ARGS=(
    --config-name=ppo_megatron_trainer
    data.train_files="$TRAIN_FILE"
    data.val_files="$TEST_FILE"
    data.max_prompt_length="$MAX_PROMPT"
    data.max_response_length="$MAX_RESPONSE"
    data.truncation=left
    data.train_batch_size="$TRAIN_BATCH"

    # 2 responses per prompt, advantages relative to their mean; ratios and clipping per response (docs/gspo.md).
    # The published aggregation mode, token-mean, had no effect in verl's GSPO; here it would.
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    algorithm.kl_ctrl.kl_coef=0.0
    actor_rollout_ref.actor.policy_loss.loss_mode="${LOSS_MODE:-gspo}"
    actor_rollout_ref.actor.loss_agg_mode="${LOSS_AGG_MODE:-seq-mean-token-mean}"
    actor_rollout_ref.actor.clip_ratio_low="${CLIP_RATIO_LOW:-0.0003}"
    actor_rollout_ref.actor.clip_ratio_high="${CLIP_RATIO_HIGH:-0.0004}"
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.kl_loss_coef=0.0
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler=True   # else a resumed run warms up again
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.optim.clip_grad=1.0

    # The trainer: Megatron; everything is offloaded, and all activations are recomputed (docs/training_memory.md).
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.strategy=megatron
    actor_rollout_ref.actor.megatron.use_mbridge=True   # reads and writes Hugging Face weights
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$TP"
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$PP"
    actor_rollout_ref.actor.megatron.expert_model_parallel_size="$EP"
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.param_offload=True
    actor_rollout_ref.actor.megatron.grad_offload=True
    actor_rollout_ref.actor.megatron.optimizer_offload=True
    actor_rollout_ref.ref.megatron.param_offload=True
    actor_rollout_ref.actor.use_torch_compile=False
    +"$TRANSFORMER".moe_router_dtype=fp32                 # routing depends on small differences
    "$TRANSFORMER".recompute_granularity=full
    "$TRANSFORMER".recompute_method=uniform
    "$TRANSFORMER".recompute_num_layers=1
    +"$TRANSFORMER".use_flash_attn=True
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.whole_batch_loss=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((MAX_PROMPT + MAX_RESPONSE))
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8   # unused with dynamic batches, but required by verl
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4

    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=2
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.tensor_model_parallel_size="$GEN_TP"
    actor_rollout_ref.rollout.data_parallel_size="$GEN_DP"
    actor_rollout_ref.rollout.expert_parallel_size=$((GEN_TP * GEN_DP))     # verl 0.7.1 supports DP only with EP
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80
    actor_rollout_ref.rollout.max_model_len=$((MAX_PROMPT + MAX_RESPONSE))
    actor_rollout_ref.rollout.max_num_batched_tokens=$((MAX_PROMPT + MAX_RESPONSE))
    actor_rollout_ref.rollout.max_num_seqs=64
    actor_rollout_ref.rollout.enable_chunked_prefill=True
    actor_rollout_ref.rollout.enforce_eager=False
    "actor_rollout_ref.rollout.cudagraph_capture_sizes=[8,16,32,64]"
    +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY
    actor_rollout_ref.rollout.calculate_log_probs=True  # training/rollout_probs_diff_* shows whether it is the same model
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
    actor_rollout_ref.rollout.val_kwargs.top_k=-1

    trainer.total_epochs=10
    trainer.total_training_steps=300
    trainer.val_before_train=False
    trainer.test_freq=-1
    trainer.save_freq="${SAVE_FREQ:-10}"
    trainer.max_actor_ckpt_to_keep=2
    trainer.log_val_generations=10
)
math_reward
overlong_penalty
trainer
smoke moe megatron

train verl.trainer.main_ppo "${ARGS[@]}" "$@"
