"""The command ``python -m ascend_rl.rehearsal``: see ascend_rl/recipe/rehearsal.py."""

from ascend_rl.recipe.rehearsal import main

if __name__ == "__main__":
    main()
