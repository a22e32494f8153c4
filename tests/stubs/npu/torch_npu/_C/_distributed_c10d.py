"""HCCL, whose work gloo does. MindSpeed asks what its options can do: nothing; vllm-ascend for its name."""

from torch.distributed import ProcessGroupGloo


class ProcessGroupHCCL(ProcessGroupGloo):
    class Options:
        """Takes any attribute."""

    def get_hccl_comm_name(self, rank: int) -> str:
        return "gloo"
