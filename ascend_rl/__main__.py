"""The command ``ascend-rl``, whose commands also run as modules: ``python -m ascend_rl.tiny``."""

import sys

# What users call: the module whose main() is the command, what it does.
COMMANDS = {
    "preflight": ("preflight.preflight", "find what would make a run fail, on this node or on a cluster"),
    "lint": ("lint.lint", "find mistakes in a training script and its environment"),
    "plan": ("estimate.memory_plan", "say whether a model fits in memory, and how"),
    "step-time": ("recipe.step_time", "estimate the time of a step, and what a switch would save"),
    "rehearsal": ("recipe.rehearsal", "report a rehearsal (SMOKE=1): what was replaced, what ran how often"),
    "data": ("recipe.data", "download and convert a data set"),
    "tiny": ("recipe.tiny", "make the tiny Qwen3, its tokenizer and its task"),
    "report": ("recipe.report", "show what a run did, in numbers, pictures and one page"),
    "evaluate": ("recipe.evaluate", "grade a model on math problems"),
    "export": ("weights.export", "write a checkpoint as a Hugging Face model"),
}


def run(name: str) -> int | None:
    """The command's exit status; Ctrl-C ends it without a traceback, during its imports too."""
    try:
        import importlib

        return importlib.import_module(f"ascend_rl.{COMMANDS[name][0]}").main()
    except KeyboardInterrupt:
        return 130


def main() -> int | None:
    try:
        import argparse

        lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
        parser = argparse.ArgumentParser(
            "ascend-rl",
            usage="%(prog)s COMMAND [-h] [ARGUMENTS...]",
            epilog="\n".join(["commands:", *lines]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the list below")
        name = parser.parse_args(sys.argv[1:2]).command
    except KeyboardInterrupt:
        return 130
    del sys.argv[1]
    return run(name)


if __name__ == "__main__":
    sys.exit(main())
