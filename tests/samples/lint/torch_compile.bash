# finds: train.torch_compile
# verl's default compiles the entropy; Inductor fails on an NPU.
. "$(dirname "$0")/fsdp.bash"
unset "SET[$actor.use_torch_compile]" #-
run "$@"
