#!/usr/bin/env bash
# GSPO on Qwen3-32B with FSDP2: 16K prompts, 16K responses, DAPO-Math-17k; Ulysses SP4, vLLM TP4.
#
# Usage:    bash ray_start_npu.sh internal/train_gspo_qwen3_32b_64die_true_weight.sh internal/qwen3_32b_env.sh \
#               [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/train_gspo_qwen3_32b_64die_true_weight.sh internal/qwen3_32b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_gspo_qwen3_32b_64die_true_weight.sh internal/qwen3_32b_env.sh
# Writes:   OUTPUT_DIR (outputs/gspo_qwen3_32b_64die_true_weight): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: 4 Atlas A3 nodes of 16 dies (or 8 Atlas A2 nodes of 8), storage shared by all of them
# Duration: not published
#
# Variables: NNODES (4), NPUS_PER_NODE (16), MODEL_PATH, TRAIN_FILE (DAPO-Math-17k), TEST_FILE (AIME),
#            OUTPUT_DIR, SAVE_FREQ (10); SMOKE=1 runs it scaled down on a laptop (docs/rehearsal.md)
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
case "${1:-}" in -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;; esac
use_python
dies 4 16
inputs Qwen/Qwen3-32B dapo_math aime

MAX_PROMPT=16384 MAX_RESPONSE=16384
TRAIN_BATCH=256 MINI_BATCH=64       # four updates per step
SP=4 GEN_TP=4
TOKENS_PER_DIE=$(((MAX_PROMPT + MAX_RESPONSE) / SP))    # Ulysses splits a sequence into SP pieces
whole "$DIES" "$SP" "DIES must be a multiple of SP"
whole "$DIES" "$GEN_TP" "DIES must be a multiple of GEN_TP"

ARGS=(
    data.train_files="$TRAIN_FILE"
    data.val_files="$TEST_FILE"
    data.max_prompt_length="$MAX_PROMPT"
    data.max_response_length="$MAX_RESPONSE"
    data.truncation=left
    data.train_batch_size="$TRAIN_BATCH"

    # GSPO: 16 responses per prompt, advantages relative to their mean; ratios and clipping per response (docs/gspo.md).
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    algorithm.kl_ctrl.kl_coef=0.0
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=0.0003
    actor_rollout_ref.actor.clip_ratio_high=0.0004
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.kl_loss_coef=0.0
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.grad_clip=1.0

    # The trainer: FSDP2 over all dies. Memory: offload, recomputed activations, chunked and recomputed entropy.
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ulysses_sequence_parallel_size="$SP"
    actor_rollout_ref.actor.use_torch_compile=False
    actor_rollout_ref.actor.fsdp_config.fsdp_size=-1
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.actor.fsdp_config.forward_prefetch=True
    actor_rollout_ref.actor.entropy_checkpointing=True
    actor_rollout_ref.actor.entropy_from_logits_with_chunking=True
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    actor_rollout_ref.ref.fsdp_config.forward_prefetch=True
    actor_rollout_ref.ref.entropy_checkpointing=True
    actor_rollout_ref.ref.entropy_from_logits_with_chunking=True
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.whole_batch_loss=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$TOKENS_PER_DIE"
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu="$TOKENS_PER_DIE"
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$TOKENS_PER_DIE"

    # The rollout: 16 servers on 64 dies, 256 sequences each. Graphs for decoding only, one per listed batch size.
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.tensor_model_parallel_size="$GEN_TP"
    actor_rollout_ref.rollout.gpu_memory_utilization=0.90
    actor_rollout_ref.rollout.max_model_len=$((MAX_PROMPT + MAX_RESPONSE))
    actor_rollout_ref.rollout.max_num_batched_tokens=$((MAX_PROMPT + MAX_RESPONSE))
    actor_rollout_ref.rollout.max_num_seqs=256
    actor_rollout_ref.rollout.enable_chunked_prefill=True
    actor_rollout_ref.rollout.enforce_eager=False
    actor_rollout_ref.rollout.free_cache_engine=True
    "actor_rollout_ref.rollout.cudagraph_capture_sizes=[8,16,32,64,128,192,256]"
    +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY
    actor_rollout_ref.rollout.calculate_log_probs=True  # training/rollout_probs_diff_* shows whether it is the same model
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
    actor_rollout_ref.rollout.val_kwargs.top_k=-1

    trainer.balance_batch=True
    trainer.total_epochs=10
    trainer.val_before_train=False
    trainer.test_freq=-1
    trainer.save_freq="${SAVE_FREQ:-10}"
    trainer.max_actor_ckpt_to_keep=2
)
math_reward
trainer
smoke dense fsdp

train verl.trainer.main_ppo "${ARGS[@]}" "$@"
