# finds: config.unknown_key algorithm.filter_groups
# A GSPO script made from a DAPO one; nothing in verl 0.7.1 samples groups again.
. "$(dirname "$0")/fsdp.bash"
run algorithm.filter_groups.enable=True "$@" #-
run "$@" #+
