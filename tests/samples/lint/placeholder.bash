# finds: script.placeholder
# The head's address was never filled in.
. "$(dirname "$0")/megatron.bash"
export MASTER_ADDR="<HEAD_IP>" #-
export MASTER_ADDR="${MASTER_ADDR:-192.0.2.1}" #+
run "$@"
