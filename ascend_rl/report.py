"""The command ``python -m ascend_rl.report``: see ascend_rl/recipe/report.py."""

from ascend_rl.estimate.step_time import of_run
from ascend_rl.recipe.report import main

if __name__ == "__main__":
    main(of_run)
