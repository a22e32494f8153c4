"""The command ``python -m ascend_rl.tiny``: see ascend_rl/recipe/tiny.py."""

from ascend_rl.recipe.tiny import main

if __name__ == "__main__":
    main()
