"""Where this project's settings are in verl 0.9.1's configuration: ``actor_rollout_ref.rollout.custom``.

verl keeps that dictionary for others. `stacks/cann9.1/recipe.sh` writes the recipes' keys into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_rl.settings.switch import switched_on

MANAGER = "ascend_rl.glue.cann9_1.rollout_manager.RolloutManager"


def ours(rollout: Any) -> bool:
    """Whether a run has this project's rollout manager (``rollout.agent.agent_loop_manager_class``)."""
    return rollout.agent.get("agent_loop_manager_class") == MANAGER


def options(rollout: Any) -> Mapping[str, Any]:
    """The settings of verl's rollout configuration, defaults included."""
    off = {"data_rebalance": False, "use_tqdm": False}
    defaults = off | {"compute_old_log_prob": True, "partial_rollout": True}
    given = dict(rollout.get("custom") or {})
    moves = {"enable": switched_on("ROLLOUT_REBALANCE_ENABLE")} | dict(given.get("rollout_rebalance") or {})
    return defaults | given | {"rollout_rebalance": moves}
