"""The state for fp8 that TransformerEngine's modules save beside their weights; empty without fp8."""

import torch


class ExtraState:
    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        pass
