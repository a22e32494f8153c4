"""vLLM's KV connector by which requests that move between rollout servers bring their KV."""

from __future__ import annotations

from ascend_rl.rollout.moved_kv import MovedKV
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class MovedKVConnector(MovedKV, KVConnectorBase_V1):
    """Constructed by vLLM, by the name in --kv-transfer-config (`rollout.moved_kv.CONNECTOR`)."""
