# finds: train.flash_attn
# MindSpeed cannot build the mask of packed batches, or runs out of memory.
. "$(dirname "$0")/megatron.bash"
unset "SET[$transformer.use_flash_attn]" #-
run "$@"
