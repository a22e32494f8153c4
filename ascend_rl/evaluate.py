"""The command ``python -m ascend_rl.evaluate``: see ascend_rl/recipe/evaluate.py."""

from ascend_rl.recipe.evaluate import main

if __name__ == "__main__":
    raise SystemExit(main())
