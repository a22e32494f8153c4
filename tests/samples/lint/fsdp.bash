# shellcheck shell=bash
# A clean GSPO run of Qwen2.5-3B with FSDP on one node of 8 dies, which the samples here spoil.
export NNODES=1 NPUS_PER_NODE=8
export VLLM_ASCEND_ENABLE_NZ=0 TASK_QUEUE_ENABLE=2 HCCL_CONNECT_TIMEOUT=7200 HCCL_EXEC_TIMEOUT=7200
export HCCL_HOST_SOCKET_PORT_RANGE=auto HCCL_NPU_SOCKET_PORT_RANGE=auto
export CPU_AFFINITY_CONF=0 MULTI_STREAM_MEMORY_REUSE=1 ACL_OP_COMPILER_CACHE_MODE=enable

CONFIG=ppo_trainer
actor=actor_rollout_ref.actor
rollout=actor_rollout_ref.rollout
vllm=+$rollout.engine_kwargs.vllm
declare -A SET=(
    [algorithm.adv_estimator]=grpo
    [data.train_batch_size]=512
    [data.max_prompt_length]=2048
    [data.max_response_length]=8192
    [actor_rollout_ref.model.path]=/data/Qwen2.5-3B-Instruct
    [actor_rollout_ref.model.use_remove_padding]=True
    [$actor.policy_loss.loss_mode]=gspo
    [$actor.loss_agg_mode]=seq-mean-token-mean
    [$actor.clip_ratio_low]=3e-4
    [$actor.clip_ratio_high]=4e-4
    [$actor.ppo_mini_batch_size]=128
    [$actor.ppo_micro_batch_size_per_gpu]=8
    [$actor.use_torch_compile]=False
    [$actor.ulysses_sequence_parallel_size]=4
    [$rollout.name]=vllm
    [$rollout.n]=16
    [$rollout.tensor_model_parallel_size]=2
    [$rollout.log_prob_micro_batch_size_per_gpu]=8
    [$rollout.gpu_memory_utilization]=0.6
    [$rollout.max_num_seqs]=64
    [$rollout.max_num_batched_tokens]=10240
    [$rollout.enforce_eager]=True
    [trainer.device]=npu
    [trainer.save_freq]=10
    [trainer.nnodes]=$NNODES
    [trainer.n_gpus_per_node]=$NPUS_PER_NODE
)

# run ARGS...: start the run with SET and ARGS.
run() {
    local key args=()
    for key in "${!SET[@]}"; do args+=("$key=${SET[$key]}"); done
    python3 -m verl.trainer.main_ppo --config-name="${CONFIG:-ppo_megatron_trainer}" "${args[@]}" "$@"
}
