# shellcheck shell=bash
# A clean GRPO run of Qwen3-30B-A3B on 2 nodes of 8 dies, which the samples here spoil. SET holds the overrides.
export NNODES=2 NPUS_PER_NODE=8
export VLLM_ASCEND_ENABLE_NZ=0 TASK_QUEUE_ENABLE=1 HCCL_CONNECT_TIMEOUT=7200 HCCL_EXEC_TIMEOUT=7200
export HCCL_HOST_SOCKET_PORT_RANGE=auto HCCL_NPU_SOCKET_PORT_RANGE=auto
export CPU_AFFINITY_CONF=0 MULTI_STREAM_MEMORY_REUSE=1 ACL_OP_COMPILER_CACHE_MODE=enable

actor=actor_rollout_ref.actor
megatron=$actor.megatron
transformer=+$megatron.override_transformer_config
rollout=actor_rollout_ref.rollout
vllm=+$rollout.engine_kwargs.vllm
declare -A SET=(
    [algorithm.adv_estimator]=grpo
    [data.train_batch_size]=64
    [data.max_prompt_length]=2048
    [data.max_response_length]=8192
    [actor_rollout_ref.model.path]=/data/Qwen3-30B-A3B
    [$actor.ppo_mini_batch_size]=64
    [$actor.use_dynamic_bsz]=True
    [$actor.ppo_max_token_len_per_gpu]=5120
    [$actor.optim.clip_grad]=1.0
    [$megatron.tensor_model_parallel_size]=4
    [$megatron.pipeline_model_parallel_size]=2
    [$megatron.context_parallel_size]=2
    [$megatron.expert_model_parallel_size]=8
    [$megatron.expert_tensor_parallel_size]=1
    [$megatron.param_offload]=True
    [$transformer.use_flash_attn]=True
    [$transformer.swap_optimizer]=True
    [$transformer.recompute_granularity]=full
    [$transformer.recompute_method]=uniform
    [$transformer.recompute_num_layers]=1
    [$rollout.name]=vllm
    [$rollout.n]=4
    [$rollout.tensor_model_parallel_size]=4
    [$rollout.data_parallel_size]=4
    [$rollout.expert_parallel_size]=16
    [$rollout.gpu_memory_utilization]=0.85
    [$rollout.max_model_len]=10240
    [$rollout.max_num_seqs]=64
    [$rollout.max_num_batched_tokens]=10240
    [$rollout.cudagraph_capture_sizes]=[8,16,32,64]
    [$vllm.compilation_config.cudagraph_mode]=FULL_DECODE_ONLY
    [trainer.device]=npu
    [trainer.nnodes]=$NNODES
    [trainer.n_gpus_per_node]=$NPUS_PER_NODE
    [trainer.default_local_dir]=/data/checkpoints
    [trainer.save_freq]=10
)

# run ARGS...: start the run with SET and ARGS.
run() {
    local key args=()
    for key in "${!SET[@]}"; do args+=("$key=${SET[$key]}"); done
    python3 -m verl.trainer.main_ppo --config-name="${CONFIG:-ppo_megatron_trainer}" "${args[@]}" "$@"
}
