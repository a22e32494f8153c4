# finds: script.home
# Caches and Ray's files move with HOME.
. "$(dirname "$0")/megatron.bash"
export HOME=$(pwd) #-
export HF_HOME=/data/huggingface #+
run "$@"
