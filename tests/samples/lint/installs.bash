# finds: script.installs
# Another transformers than the lock's asks for the metadata of flash_attn.
. "$(dirname "$0")/fsdp.bash"
pip install transformers==4.53.3 #-
run "$@"
