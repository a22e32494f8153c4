# finds: options.transformer
# Megatron-core raises TypeError; with MindSpeed the layers are simply not recomputed.
. "$(dirname "$0")/megatron.bash"
run "$transformer".distribute_saved_activation=True "$@" #-
run "$transformer".distribute_saved_activations=True "$@" #+
