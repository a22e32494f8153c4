# finds: parallel.layers
# 94 layers do not split into 4 equal stages.
. "$(dirname "$0")/megatron.bash"
export NNODES=8 NPUS_PER_NODE=16
SET[trainer.nnodes]=$NNODES SET[trainer.n_gpus_per_node]=$NPUS_PER_NODE
SET[actor_rollout_ref.model.path]=/data/Qwen3-235B-A22B
SET[$megatron.pipeline_model_parallel_size]=4
SET[$megatron.context_parallel_size]=4
SET[$megatron.expert_model_parallel_size]=32
SET[$transformer.num_layers_in_first_pipeline_stage]=23 #+
SET[$transformer.num_layers_in_last_pipeline_stage]=23 #+
SET[$rollout.data_parallel_size]=32
SET[$rollout.expert_parallel_size]=128
run "$@"
